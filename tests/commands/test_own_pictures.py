"""One command from a folder of pictures to samples, and its parts."""

import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from forking import start
from PIL import Image
from script_running import environment, run
from shard_making import encoded, make_shards, random_image
from tiny_settings import GENERATOR_RUN, flags

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.model_folder import find_file
from diff_dalle.checkpoints.record import RECORD, load_record, save_record
from diff_dalle.commands import running
from diff_dalle.commands.examples import SCRIPTS
from diff_dalle.commands.own_pictures import PRESETS, OwnPictures, make_plan, read_command_line
from diff_dalle.config import InputError

SMALL = {**GENERATOR_RUN, "text_length": 24, "diffusion_steps": 100, "iterations": 2, "batch_size": 4, "ema_rate": 0.9}
OF_U_NET = ("patch_size", "output_conv")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def pictures(folder: str, count: int) -> str:
    Path(folder).mkdir()
    for i in range(count):
        Path(folder, f"red_barn {i}.png").write_bytes(encoded(random_image(seed=i), "PNG"))
    return folder


def plan(*flags: str, **own):
    return make_plan("photos", OwnPictures(**own), flags)


class Copied:
    """A command that starts in milliseconds, and prints at its end."""

    def __init__(self, words, twofold):
        script, *given = map(str, words)
        self.process = start([str(SCRIPTS / script), *given], environment(), merged=True)

    def wait(self):
        print(self.process.communicate()[0])
        return self.process.returncode


def test_a_folder_becomes_samples_and_the_same_command_continues(monkeypatch):
    monkeypatch.setattr(running, "start", Copied)
    pictures("photos", 5)
    Path("photos/red_barn 3.txt").write_text("a green barn")
    small = [*flags({**SMALL, "patch_size": 1, "output_conv": 0})]
    done = run("train.py", "photos", *small)
    lines = done.stdout.splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("$ ")]
    assert [words[1] for words in commands] == [
        f"scripts/{name}.py" for name in ("prepare_data", "train_generator", "sample", "sample")
    ]
    assert commands[1][2:4] == ["--preset", "pictures_300"] and "each about 1.6 times" in lines[0]
    assert "red barn|a green barn" in commands[2] and "red barn" in commands[3]
    assert "logdir:     runs/photos" in lines
    assert any(line.startswith("4 pictures: captioned by the words of their names") for line in lines)
    assert Path("runs/photos/pictures/grid.jpg").is_file() and load_file("runs/photos")["step"] == 2
    again = run("train.py", "photos", *small, "--iterations=3", ok=False)
    assert "--iterations is given 2 times" in again.stderr
    small[small.index("--iterations") + 1] = "3"
    again = run("train.py", "photos", *small)
    assert "prepare_data" not in again.stdout and "2 are done" in again.stdout
    assert load_file("runs/photos")["step"] == 3


def test_shards_are_made_again_when_the_folder_changes():
    pictures("photos", 2)
    first = plan()
    assert first.pack and first.shards.startswith("data/photos-") and plan() == first
    assert plan(name_captions=False).shards != first.shards != plan(resize=64).shards
    Path("photos/red_barn 1.png").write_bytes(b"another")
    assert plan().shards != first.shards
    assert plan(shards_dir="own").shards == "own" and not Path("own").exists()


def test_large_photographs_are_reduced_in_the_shards():
    Path("photos").mkdir()
    Path("photos/sea.jpg").write_bytes(encoded(random_image(600, 800), "JPEG"))
    found = plan()
    run(*map(str, found.pack))
    with tarfile.open(next(Path(found.shards).glob("*.tar"))) as tar:
        (name,) = (each for each in tar.getnames() if each.endswith(".jpg"))
        assert Image.open(tar.extractfile(name)).size == (683, 512)
    assert plan("--image_size", "64", resize=64).pack
    assert plan().pack is None
    with pytest.raises(InputError, match=r"resize is 512, but must be at least image_size \(1024\)"):
        plan("--image_size", "1024")  # of shards that are there already
    assert plan("--image_size", "1024", resize=0).pack


def test_shards_are_taken_as_they_are():
    Path("photos").mkdir()
    make_shards(Path("photos"), [3])
    assert plan().pack is None and plan().train[-2:] == ["--data_dir", "photos"]
    Path("photos/a.png").touch()  # beside which a tar is one of the files that packing tells of
    assert plan().pack


def test_the_preset_suits_number_and_machine(monkeypatch):
    Path("photos").mkdir()
    Path("photos/0.png").touch()
    assert plan().train[1:3] == ["--preset", "pictures_300"]
    monkeypatch.setattr("diff_dalle.commands.own_pictures.PRESETS", ((1, *PRESETS[0][1:]), *PRESETS[1:]))
    assert plan().train[1:3] == ["--preset", "pictures_5000"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plan().train[1:3] == ["--preset", "generator_64_small"]
    assert "generator_64_tiny" in plan("--preset", "generator_64_tiny").train
    assert plan("--preset=generator_64_tiny").notes == []


def test_a_lora_over_a_bundled_model():
    pictures("photos", 1)
    found = plan("--rank", "2", model_path="emoji")
    assert found.train[:3] == ["train_lora.py", "--model_path", "emoji"] and "pictures_lora" in found.train
    assert found.sample == ["sample.py", "--model_path", "emoji", "--lora", "runs/photos_lora"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one folder of pictures"),
        (["photos", "other"], "but these are photos, other"),
        (["missing"], "missing is not a folder"),
        (["empty"], "empty holds no pictures"),
        (["photos", "--learning_rate", "1"], "--lr"),
        (["photos", "--lr", "-1"], "lr is -1"),
        (["photos", "--model_path", "emojis"], "no bundled model"),
        (["photos", "--model_path", "emoji", "--noise_schedule", "linear"], "says its settings itself"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(words, message):
    pictures("photos", 1)
    Path("empty").mkdir()
    done = run("train.py", *words, ok=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["empty", "photos"]


def test_flags_and_folder_in_any_order():
    words = ["--lr", "1", "photos"]
    with pytest.raises(InputError, match="give one folder"):
        read_command_line(["--plan"], "")
    assert read_command_line([*words, "--plan", "True"], "")[0] == "photos"
    assert read_command_line(["photos", *words[:2], "--plan=True"], "") == (
        "photos",
        OwnPictures(plan=True),
        ["--lr", "1"],
    )


def test_a_command_that_is_interrupted_ends_by_itself(monkeypatch, tmp_path):
    """Ctrl-C reaches both: the command may save, and then its status counts."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "save.py").write_text(
        "import os, signal, sys, time\n"
        "try:\n    os.kill(os.getppid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1); print('saved', flush=True); sys.exit(130)\n"
    )
    program = (
        "import signal; from pathlib import Path; from diff_dalle.commands import running\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in a shell's background ignores it
        f"running.SCRIPTS = Path({str(scripts)!r}); running.run_shown(['save.py'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.returncode == 130 and "saved" in done.stdout and done.stderr == ""


def test_commands_are_spelled_as_this_one_was_called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diff-dalle train"])
    assert running.as_typed(["sample.py", "--prompts", "a b"]) == "diff-dalle sample --prompts 'a b'"
    monkeypatch.setattr(sys, "argv", ["scripts/train.py"])
    assert running.as_typed(["sample.py"]) == "python scripts/sample.py"


def test_the_folder_of_a_run_stands_for_its_weights(tmp_path):
    """Its best ones, or the last average."""
    Path("photos").mkdir()
    make_shards(Path("photos"), [4])
    run("train_generator.py", "--data_dir", "photos", "--logdir", "run", *flags({**SMALL, "save_interval": 1}))
    assert find_file("run") == "run/ema_0.9_000002.pt"
    record = load_record("run")
    record.best[""] = {"step": 1, "loss": 0.5}
    save_record("run", record)
    assert find_file("run") == "run/best.pt"
    record.best, record.checkpoints = {}, []
    save_record("run", record)
    with pytest.raises(InputError, match="holds no weights of one network"):
        find_file("run")
    assert RECORD not in find_file("photos")
