"""share.py: models go to a hub of this machine or a folder and come back, or one sentence says why not."""

import json
import re

import numpy as np
import pytest
import yaml
from checkpoint_making import make_classifier_file, make_file, sample
from share_making import refused, share

import diff_dalle
from diff_dalle import storage
from diff_dalle.checkpoints.checkpoint import Identity, load_file
from diff_dalle.checkpoints.model_folder import open_model
from diff_dalle.checkpoints.record import CheckpointSet, Record, save_record
from diff_dalle.sharing import transfer

HUB = "hf://me/it"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Flags of a generator, an upsampler and a classifier."""
    home = tmp_path_factory.mktemp("checkpoints")
    (home / "upsampler").mkdir()
    upsampler = make_file(home / "upsampler", image_size=32, small_size=16)
    generator, classifier = make_file(home), make_classifier_file(home)
    return f"--model_path {generator} --upsampler_paths {upsampler} --classifier_path {classifier}"


@pytest.fixture(scope="module")
def generator(checkpoints):
    return checkpoints.partition(" --up")[0]


def images(model: str, classifier: str) -> np.ndarray:
    return sample(diff_dalle.load(model), ["a red circle"], seed=3, classifier=classifier, classifier_scale=2.0)


# ----------------------------------------------------------------------------------------------------- there and back


def test_pictures_are_the_same_before_and_after(hub, checkpoints, tmp_path):
    """Of the checkpoints, of the repository, and of what is pulled from it; the model is one commit."""
    path, upsampler, classifier = checkpoints.split()[1::2]
    parts = diff_dalle.load(path, upsampler_paths=[upsampler])
    options = {"classifier": classifier, "classifier_scale": 2.0}
    before = sample(parts, ["a red circle"], seed=3, **options)
    line = share("push", checkpoints, f"--to {HUB} --precision fp32")
    names = {"README.md", "model.json", "generator.safetensors", "upsampler.safetensors", "classifier.safetensors"}
    assert set(hub.repos["me/it"]) == names and len(hub.commits) == 1 and all(name in line for name in names)
    assert hub.private == {"me/it"}
    assert before.shape == (1, 32, 32, 3) and np.array_equal(before, images(HUB, HUB))
    folder = str(tmp_path / "pulled")
    share("pull", f"--from {HUB} --to {folder}")
    assert np.array_equal(before, images(folder, folder))
    assert {storage.split(path)[1] for path in storage.list_files(folder)} == names


def test_half_precision_is_the_same_on_the_way_and_smaller(hub, checkpoints, tmp_path):
    share("push", checkpoints, f"--to {tmp_path}/model")
    share("push", f"--model_path {tmp_path}/model --to {HUB}/ --private False")
    assert hub.private == set()
    share("pull", f"--model_path {HUB}/ --to {tmp_path}/pulled/")
    for path in (tmp_path / "model").iterdir():
        assert (tmp_path / "pulled" / path.name).read_bytes() == path.read_bytes() == hub.repos["me/it"][path.name]
    share("push", checkpoints, f"--to {tmp_path}/whole --precision fp32")
    sizes = [(tmp_path / name / "generator.safetensors").stat().st_size for name in ("model", "whole")]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("remote", [False, True])
def test_copies_move_a_bar(tmp_path, monkeypatch, remote):
    """By parts, or, where files are sent when they are complete, by files; those that are there already too."""
    moves, names = [], ("a", "b")
    monkeypatch.setattr(transfer, "tqdm", lambda **given: Bar(moves, **given))
    monkeypatch.setattr(transfer, "_CHUNK", 2)
    monkeypatch.setattr(storage, "is_remote", lambda path: remote and "to" in path)
    monkeypatch.setattr(storage, "atomic_writer", lambda path: open(path, "wb"))  # noqa: SIM115
    for name in names:
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "to").mkdir()
    transfer.copy_files({name: str(tmp_path / name) for name in names}, str(tmp_path / "to"), "Sending")
    assert moves == [10, *([5, 5] if remote else [2, 2, 1, 0, 2, 2, 1, 0])]
    assert [(tmp_path / "to" / name).read_bytes() for name in names] == [b"12345"] * 2


class Bar:
    def __init__(self, moves, total, **given):
        self.update = moves.append
        moves.append(total)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_a_revision_is_pulled(hub, generator, tmp_path):
    share("push", generator, f"--to {HUB} --title First")
    share("push", generator, f"--to {HUB} --title Second")
    first = next(name for name, files in hub.old["me/it"].items() if files)
    share("pull", f"--from {HUB}@{first} --to {tmp_path}/first")
    share("pull", f"--from {HUB} --to {tmp_path}/second")
    assert [open_model(str(tmp_path / name)).card.count("# First") for name in ("first", "second")] == [1, 0]


def test_another_model_takes_the_place_of_the_first_in_one_commit(hub, checkpoints, generator, tmp_path):
    """Files that others put there stay, also those that could be a model's."""
    report = tmp_path / "report"
    report.mkdir()
    (report / "scores.json").write_text("{}")
    (report / "report.md").write_text("# Report\n\n![Samples](grid.png)\n")
    (report / "grid.png").write_bytes(PNG)
    share("push", checkpoints, f"--to {HUB} --report_dir {report}")
    first = set(hub.repos["me/it"])
    others = dict.fromkeys(["LICENSE", "own.png", "other.safetensors", "notes.md", "sub/grid.png", ".hidden"], b"x")
    hub.repos["me/it"] |= {**others, "generator_progress.csv": b"step\n"}
    share("push", generator, f"--to {HUB}")
    kept = {"README.md", "model.json", "generator.safetensors"}
    assert set(hub.repos["me/it"]) == {*kept, *others} and len(hub.commits) == 2
    assert first - kept == {"upsampler.safetensors", "classifier.safetensors", "report.md", "scores.json", "grid.png"}
    hub.repos["me/it"]["model.json"] = b"{}"  # nobody knows what was with it
    hub.repos["me/it"]["scores.json"] = b"{}"
    share("push", generator, f"--to {HUB}")
    assert set(hub.repos["me/it"]) == {*kept, *others, "scores.json"}


def test_the_logs_come_along(tmp_path):
    """That of the run that trained a network, and no log that happens to be beside its checkpoint."""
    for name in ("run", "other"):
        folder = tmp_path / name
        folder.mkdir()
        path = make_file(folder)
        (folder / "progress.csv").write_text(f"step,loss\n7,{len(name)}\n")
        (folder / "progress.jsonl").write_text('{"step": 7, "samples": 70, "samples_per_second": 10}\n')
        if name == "run":
            content = load_file(path)
            identity = Identity(content["kind"], content["config"], content["tokenizer"])
            save_record(str(folder), Record(identity, [CheckpointSet(7, 70, {}, 10, {})], {}, []))
        share("push", "--model_path", path, "--to", str(tmp_path / f"{name}_model"))
    log = tmp_path / "run_model" / "generator_progress.csv"
    assert log.read_text() == "step,loss\n7,3\n"
    assert not list((tmp_path / "other_model").glob("*.csv"))
    share("pull", f"--from {tmp_path}/run_model --to {tmp_path}/pulled")
    assert (tmp_path / "pulled" / log.name).exists()


def test_the_report_comes_along(checkpoints, tmp_path):
    report = tmp_path / "report"
    report.mkdir()
    row = {"score": 0.5, "low": 0.25, "high": 0.75, "chance": 0.125, "n": 4}
    (report / "scores.json").write_text(json.dumps({"step": 7, "scores": {"color": row}}))
    text = "# Report\n\n![Samples](grid.png)\n\n![Loss](loss.png)\n\n![Other](../secret.png)\n"
    (report / "report.md").write_text(text)
    for name in ("grid.png", "loss.png", "unused.png", "../secret.png"):
        (report / name).write_bytes(PNG)
    flags = "--license mit --description 'Of shapes.' --example_prompt 'a blue square' --title Shapes"
    share("push", checkpoints, f"--to {tmp_path}/model --report_dir {report}", flags)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"grid.png", "loss.png", "report.md", "scores.json"} <= names and not {"unused.png", "secret.png"} & names
    card = open_model(str(tmp_path / "model")).card
    assert "| color | 0.5 (0.25 – 0.75) | 0.125 | 4 |" in card and card.count("![") == 1 and "(grid.png)" in card
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "mit" and "\n# Shapes\n\nOf shapes.\n" in card
    assert f"--model_path {tmp_path}/model --prompts 'a blue square'" in card
    assert all(f"`{name}`" in card for name in ("generator.safetensors", "upsampler.safetensors"))
    share("pull", f"--from {tmp_path}/model --to {tmp_path}/pulled")
    assert {path.name for path in (tmp_path / "pulled").iterdir()} == names
    said = refused("push", checkpoints, f"--to {tmp_path}/other --report_dir {tmp_path}")
    assert "has no report.md" in said and not (tmp_path / "other").exists()


# ------------------------------------------------------------------------------------------------------ what is refused


def test_what_is_no_model_is_named(hub, generator, tmp_path):
    hub.repos["me/other"] = {"README.md": b"# Hello"}
    pulled = f"--to {tmp_path}/pulled"
    assert "no repository me/none that this login may see" in refused("pull", "--from hf://me/none", pulled)
    assert "it has no model.json" in refused("pull", "--from hf://me/other", pulled)
    assert "must be hf://USER/NAME" in refused("push", generator, "--to hf://me")
    assert "none.pt does not exist" in refused("push", f"--model_path {tmp_path}/none.pt --to {HUB}")
    assert "me/it" not in hub.repos and not (tmp_path / "pulled").exists()


def test_a_model_is_not_mixed_with_another(generator, tmp_path):
    share("push", generator, f"--to {tmp_path}/model")
    for command, flags in (("push", generator), ("pull", f"--from {tmp_path}/model")):
        assert "holds a model already" in refused(command, flags, f"--to {tmp_path}/model")


def test_a_hostile_name_in_the_listing_is_refused(hub, generator, tmp_path):
    """All kinds of them: tests/storage/test_hub.py."""
    share("push", generator, f"--to {HUB}")
    hub.repos["me/it"]["../../evil.md"] = b"x"
    assert "which would lie elsewhere" in refused("pull", f"--from {HUB} --to {tmp_path}/a/b/pulled")
    assert not list(tmp_path.rglob("*evil*")) and not (tmp_path / "a").exists()


def test_a_hostile_table_is_refused(hub, tmp_path):
    hub.repos["me/it"] = {"model.json": json.dumps({"model_path": ["../model.safetensors"]}).encode()}
    assert "must list names of .safetensors files beside it" in refused("pull", f"--from {HUB} --to {tmp_path}/p")


def test_only_what_belongs_to_a_model_is_pulled(hub, generator, tmp_path):
    share("push", generator, f"--to {HUB}")
    hub.repos["me/it"] |= {
        "run.py": b"x",
        ".bashrc": b"x",
        "sub/a.md": b"x",
        "LICENSE": b"MIT",
        "pytorch_model.bin": b"x",
    }
    share("pull", f"--from {HUB} --to {tmp_path}/pulled")
    names = {path.name for path in (tmp_path / "pulled").iterdir()}
    assert names == {"README.md", "model.json", "generator.safetensors", "LICENSE"}


def test_a_model_without_its_files_is_not_pulled(hub, checkpoints, tmp_path):
    share("push", checkpoints, f"--to {HUB}")
    del hub.repos["me/it"]["upsampler.safetensors"]
    assert "has no upsampler.safetensors" in refused("pull", f"--from {HUB} --to {tmp_path}/pulled")
    assert not (tmp_path / "pulled").exists()


@pytest.fixture
def copied(monkeypatch):
    """The names of the files that are written, until the name that ``copied.last`` says, which is interrupted."""
    write = storage.atomic_writer

    class Copied(list):
        last = "model.json"

    found = Copied()

    def watched(path):
        name = storage.split(path)[1]
        if name == found.last:
            raise KeyboardInterrupt
        if not name.startswith("."):
            found.append(name)
        return write(path)

    monkeypatch.setattr(storage, "atomic_writer", watched)
    return found


def pull_in_two(copied, source, folder):
    """Pull but for the table, and then the rest; returns what is written then."""
    copied.last = "model.json"
    with pytest.raises(KeyboardInterrupt):
        share("pull", f"--from {source} --to {folder}")
    assert open_model(folder) is None and len(storage.list_files(folder)) == 4
    copied.clear()
    copied.last = ""
    share("pull", f"--from {source} --to {folder}")
    assert len(open_model(folder).files) == 3
    return list(copied)


def test_an_interrupted_pull_is_no_model_and_goes_on(hub, checkpoints, tmp_path, copied):
    copied.last = ""
    share("push", checkpoints, f"--to {HUB}")
    assert pull_in_two(copied, HUB, str(tmp_path / "pulled")) == ["model.json"]
    assert sorted(path.name for path in (tmp_path / "pulled").iterdir())[0] == "README.md"  # and nothing hidden
    assert len([name for name in hub.sent if name.startswith("generator")]) == 1  # the client's cache has it


@pytest.mark.parametrize("changed", ["", "source", "copy"])
def test_a_pull_from_a_folder_goes_on_with_what_has_changed(checkpoints, tmp_path, copied, changed, monkeypatch):
    copied.last = ""
    model, pulled = tmp_path / "model", tmp_path / "pulled"
    share("push", checkpoints, f"--to {model}")
    if changed:
        target = {"source": model, "copy": pulled}[changed] / "README.md"
        remove = copied.clear
        monkeypatch.setattr(copied, "clear", lambda: (remove(), target.write_bytes(b"# Changed")), raising=False)
    again = pull_in_two(copied, str(model), str(pulled))
    assert again == (["README.md"] if changed else []) + ["model.json"]
    for path in model.iterdir():
        assert (pulled / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in pulled.iterdir()) == sorted(path.name for path in model.iterdir())


def test_logins(hub, generator, tmp_path, monkeypatch):
    share("push", generator, f"--to {HUB}")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_0123")
    said = refused("push", generator, f"--to {HUB}")
    assert "hf://me/it cannot be read or written: permission denied" in said and "hf_wrong" not in said
    monkeypatch.delenv("HF_TOKEN")
    assert "needs a login to be written: run `hf auth login`, or set HF_TOKEN" in refused(
        "push", generator, f"--to {HUB}"
    )
    said = refused("pull", f"--from {HUB} --to {tmp_path}/pulled")
    assert "no repository me/it that is visible without `hf auth login`" in said


def test_offline(hub, generator, tmp_path, monkeypatch):
    share("push", generator, f"--to {HUB}")
    before = sample(diff_dalle.load(HUB), ["a red circle"], seed=3)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert np.array_equal(before, sample(diff_dalle.load(HUB), ["a red circle"], seed=3))  # from the cache
    forbidden = "HF_HUB_OFFLINE forbids"
    assert forbidden in refused("push", generator, f"--to {HUB}")
    assert forbidden in refused("pull", f"--from hf://me/other --to {tmp_path}/pulled")


def test_a_card_that_the_hub_refuses(hub, generator):
    said = refused("push", generator, f"--to {HUB}", "--license 'none at all'")
    assert re.search("hf://me/it: http.* refuses it: .*license is none that is known", said)
    assert not hub.repos["me/it"]


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("push", "--model_path a.pt", "--to is required"),
        ("push", f"--to {HUB}", "there is nothing to send"),
        ("push", "--model_path a.pt --to folder --private False", "only hf:// can be private"),
        ("push", f"--model_path MODEL --to {HUB} --license mit --precision fp32", "leave out precision, license"),
        ("push", f"--model_path MODEL --to {HUB} --classifier_path a.pt", "leave out classifier_path"),
        ("push", "--model_path MODEL --to https://host/a", "read-only"),
        ("pull", "--to folder", "--from is required"),
        ("pull", f"--from {HUB}", "--to is required"),
    ],
)
def test_impossible_settings_are_named(hub, generator, tmp_path, monkeypatch, command, flags, said):
    if "MODEL" in flags:
        share("push", generator, f"--to {tmp_path}/model")
        monkeypatch.setattr(storage, "exists", lambda path, exists=storage.exists: "https" not in path and exists(path))
    assert said in refused(command, flags.replace("MODEL", f"{tmp_path}/model"))
