"""How the demo's chapters run commands."""

import dataclasses
import re
import time
from pathlib import Path

import pytest

from diff_dalle.checkpoints.model_folder import trained_models
from diff_dalle.commands import running
from diff_dalle.commands.demo import chapters, contract
from diff_dalle.commands.demo.chapters import CHAPTERS, PROMPTS, DemoConfig, show_first_pictures
from diff_dalle.commands.demo.contract import Demo, Job, Network, Recipe, make_model
from diff_dalle.config import InputError

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "greet.py": "import sys; print(*sys.argv[1:])",
    "meet.py": """
import pathlib, sys, time
own, other = map(pathlib.Path, sys.argv[1:3])
own.touch()
while not other.exists():
    time.sleep(0.05)
sys.stdout.write("met\\n")  # in one piece, unlike print
""",
    "fail.py": "import sys; print('no'); sys.exit(2)",
    "read.py": "import sys; open(sys.argv[1])",
    "count.py": """
import os, pathlib, sys, time
home = pathlib.Path(sys.argv[1])
own = home / f"{os.getpid()}.running"
own.touch()
time.sleep(0.5)
(home / f"{os.getpid()}.count").write_text(str(len(list(home.glob("*.running")))))
own.unlink()
print(*sys.argv[2:])
""",
    "wait.py": "import time; time.sleep(600)",
    "rank.py": """
import os, sys
rank, size, threads = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))
sys.stdout.write(f"{rank} of {size}, threads {threads}, {' '.join(sys.argv[1:])}\\n")
""",
}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / "scripts" / name).write_text(text)
    monkeypatch.setattr(running, "SCRIPTS", tmp_path / "scripts")
    return Demo(tmp_path / "home", False)


def test_a_command_is_printed_and_run(demo, capfd):
    demo.run("greet.py --name {name}", name=3)
    printed = capfd.readouterr().out
    assert "$ python scripts/greet.py --name 3" in printed and printed.rstrip().endswith("--name 3")


def test_a_command_runs_in_two_processes_that_share_the_cores(demo, capfd, monkeypatch):
    monkeypatch.setattr(contract, "_cores", lambda: 6)
    demo.run("rank.py x", twofold=True)
    printed = capfd.readouterr().out.splitlines()
    assert printed[1] == "$ torchrun --standalone --nproc_per_node 2 scripts/rank.py x"
    assert sorted(printed[2:]) == [f"{rank} of 2, threads 3, x" for rank in range(2)]
    monkeypatch.setattr(contract, "_cores", lambda: 1)
    demo.run("greet.py alone", twofold=True)
    assert capfd.readouterr().out.split() == ["$", "python", "scripts/greet.py", "alone", "alone"]


def test_jobs_run_beside_each_other(demo, capfd, tmp_path):
    """Each waits for the other; the output of all but the last and those that are shown is in files."""
    a, b = tmp_path / "a", tmp_path / "b"
    demo.run_jobs({"first": Job(["meet.py", a, b]), "last": Job(["meet.py", b, a])})
    assert capfd.readouterr().out.count("met\n") == 1 and (demo.home / "logs/first.txt").read_text() == "met\n"
    demo.run_jobs({"shown": Job(["meet.py", a, b], shown=True), "last": Job(["meet.py", b, a])})
    assert capfd.readouterr().out.count("met\n") == 2 and not (demo.home / "logs/shown.txt").exists()


def test_a_network_may_begin_on_other_data(demo, monkeypatch):
    """One run, whose data changes after some steps."""
    found = {}
    monkeypatch.setattr(Demo, "run_jobs", lambda self, jobs: found.update(jobs))
    monkeypatch.setattr("diff_dalle.commands.demo.contract.trained_file", lambda folder: folder / "best.pt")
    monkeypatch.setattr(Demo, "run", lambda self, text, **names: None)
    data = (Path("short"), Path("val"))
    networks = {name: Network("greet.py", data, 6) for name in ("classifier", "upsampler")}
    networks["generator"] = Network("greet.py", data, 6, after=("upsampler",), first=(Path("long"), 40))
    for quick, steps in ((False, [40]), (True, [3, 6])):
        found.clear()
        make_model(
            dataclasses.replace(demo, quick=quick), Recipe("m", networks, Path("s"), Path("c"), 9, "a", "", "", {})
        )
        assert [*found] == ["classifier", "upsampler", "generator_first", "generator"]
        begin, go_on = found["generator_first"], found["generator"]
        assert (begin.after, go_on.after) == (("upsampler",), ("generator_first", "classifier", "upsampler"))
        flags = [dict(zip(job.words[1::2], job.words[2::2], strict=True)) for job in (begin, go_on)]
        assert [each["--data_dir"] for each in flags] == [Path("long"), Path("short")]
        assert flags[0]["--logdir"] == flags[1]["--logdir"] and flags[0]["--val_data_dir"] == Path("val")
        assert [each["--iterations"] for each in flags if "--iterations" in each] == steps
        assert flags[1]["--accept_changed_data"] is True and "--accept_changed_data" not in flags[0]


def test_jobs_wait_for_what_they_need(demo, tmp_path):
    """And for what is called when that has ended."""
    path, found = tmp_path / "path", []
    jobs = {
        "needs": Job(["read.py", path], after=("makes",), finish=lambda: found.append("needs")),
        "makes": Job(["greet.py"], finish=lambda: (path.touch(), found.append("makes"))),
        "free": Job(["greet.py"], after=("makes", "needs"), finish=lambda: found.append("free")),
    }
    demo.run_jobs(jobs)
    assert found == ["makes", "needs", "free"]


def test_two_jobs_share_the_cores(demo, capfd, monkeypatch):
    monkeypatch.setattr(contract, "_cores", lambda: 6)
    demo.run_jobs({name: Job(["count.py", demo.home]) for name in ("a", "b", "c", "d")})
    assert "\n--threads 3" in capfd.readouterr().out and "--threads 3" in (demo.home / "logs/a.txt").read_text()
    assert max(int(path.read_text()) for path in demo.home.glob("*.count")) <= 2


def test_a_job_has_all_cores_where_no_other_can_run_beside_it(demo, capfd, monkeypatch):
    monkeypatch.setattr(contract, "_cores", lambda: 6)
    after = {"first": (), "a": ("first",), "b": ("first",), "last": ("a", "b")}
    demo.run_jobs({name: Job(["greet.py"], needed) for name, needed in after.items()})
    assert capfd.readouterr().out.splitlines().count("--threads 6") == 2
    assert [path.name for path in sorted((demo.home / "logs").iterdir())] == ["a.txt", "b.txt"]
    assert {path.read_text() for path in (demo.home / "logs").iterdir()} == {"--threads 3\n"}


@pytest.mark.parametrize("order", [1, -1])
def test_a_job_that_fails_ends_the_others(demo, order):
    started = time.monotonic()
    with pytest.raises(InputError, match=r"the demo stopped, because this command failed: python scripts/fail.py"):
        demo.run_jobs({name: Job([name]) for name in ["fail.py", "wait.py"][::order]})
    assert time.monotonic() - started < 300  # not the ten minutes of the other


def test_a_command_that_fails_stops_the_demo(demo):
    with pytest.raises(InputError, match="this command failed: python scripts/fail.py --x"):
        demo.run("fail.py --x")


def test_chapters_are_asked_for_by_name():
    assert {"generator", "shapes", "emoji", "decoder", "cascade"} == set(CHAPTERS)
    with pytest.raises(InputError, match="did you mean cascade"):
        DemoConfig(what=("cascades",))


def test_every_model_that_comes_along_is_asked_for_something():
    assert set(trained_models()) <= set(PROMPTS)


def test_the_demo_opens_with_samples_of_each(demo, monkeypatch, capfd):
    (running.SCRIPTS / "sample.py").write_text(SCRIPTS["greet.py"])
    monkeypatch.setattr(chapters, "trained_models", lambda: {"emoji": None})
    show_first_pictures(demo)
    flags = f"--model_path emoji --logdir {demo.home}/first_pictures/emoji --prompts {PROMPTS['emoji']}"
    assert capfd.readouterr().out.splitlines()[-1] == flags


@pytest.mark.parametrize("name", CHAPTERS)
@pytest.mark.parametrize("quick", [False, True])
def test_the_commands_of_a_chapter_are_such_as_scripts_take(demo, monkeypatch, name, quick):
    """Every text in a command is filled in, and its flags are pairs, beside the subcommand."""
    found: list[list[str]] = []
    monkeypatch.setattr(Demo, "run", lambda self, text, twofold=False, **names: found.append(self.words(text, **names)))
    monkeypatch.setattr(
        Demo, "run_jobs", lambda self, jobs: found.extend([*map(str, job.words)] for job in jobs.values())
    )
    monkeypatch.setattr("diff_dalle.commands.demo.contract.trained_file", lambda folder: folder / "best.pt")
    for target in ("decoder.draw_pictures", "cascade.draw_pictures", "emoji.find_font"):
        monkeypatch.setattr(f"diff_dalle.commands.demo.{target}", lambda *_: None)
    monkeypatch.setattr("shutil.copy", lambda *_: None)
    report = CHAPTERS[name].run(dataclasses.replace(demo, quick=quick))
    assert report.name == "report.md" and any(words[0] == "evaluate.py" for words in found)
    for script, *words in found:
        assert (ROOT / "scripts" / script).is_file()
        flags = words[len(words) % 2 :]
        assert all(flag.startswith("--") for flag in flags[::2]), words
        assert not any(value.startswith("--") or re.search(r"\{\w", value) for value in flags[1::2]), words
