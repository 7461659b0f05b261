"""Copies of training pictures are found, and new pictures are not taken for them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_making import make_file
from PIL import Image
from script_running import run
from shard_making import encoded, tar_bytes

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluators import context
from diff_dalle.evaluators.copies import copies, most_similar

KNOWN, HELD_OUT = 24, 20


def test_the_most_similar_of_all_batches():
    known = np.stack([np.full((4, 4, 3), value, np.uint8) for value in (0, 100, 250)])
    found, distance = most_similar(np.stack([known[1], known[2] - 10]), [known[:2], known[2:]])
    assert np.array_equal(found, known[1:]) and distance.tolist() == [0, 10]


def pictures(count: int, seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))


def shards(folder: Path, images: list[np.ndarray]) -> str:
    folder.mkdir()
    members: list[tuple[str, bytes]] = []
    for i, image in enumerate(images):
        members += [(f"{i:04d}.png", encoded(Image.fromarray(image), "PNG")), (f"{i:04d}.txt", f"picture {i}".encode())]
    (folder / "00000.tar").write_bytes(tar_bytes(members))
    return str(folder)


@pytest.fixture
def evaluation(tmp_path, monkeypatch):
    """With a training set and a function from the held-out pictures to an evaluation of given samples."""
    monkeypatch.setattr(context, "AT_ONCE", 10)
    known = pictures(KNOWN, 0)
    data = shards(tmp_path / "known", known)

    def make(held_out, samples, **network):
        path, real = make_file(tmp_path, **network), shards(tmp_path / "held_out", held_out)
        words = ["--model_path", path, "--data_dir", real, "--training_dir", data, "--steps", "2"]
        found = Evaluation(parse(EvaluateRun, [*words, "--report_dir", str(tmp_path / "report")]), ALONE)
        monkeypatch.setattr(found.context, "sample", lambda prompts, guidance: [np.stack(samples)])
        return found

    return known, make


def test_copies_are_counted(evaluation):
    """With a picture of both sets, which says nothing of how far unseen ones are."""
    known, make = evaluation
    held_out = [*pictures(HELD_OUT - 1, 1), known[3]]
    samples = [*(np.clip(each.astype(int) + 3, 0, 255).astype(np.uint8) for each in known[19:]), *pictures(15, 2)]
    found = copies(make(held_out, samples).context)
    scores = found.scores["copies"]
    assert (
        5 / 20 <= scores["near"]["value"] <= 7 / 20 and scores["near"]["n"] == 20 and scores["unseen"] == HELD_OUT - 1
    )
    assert scores["distance"] == pytest.approx(scores["unseen_distance"], rel=0.05)
    assert "except 1 of 20 that are training pictures" in found.sections[0].text
    _, _, lowest, _ = found.summary[0].rows[0]
    assert 2.5 < float(lowest) <= 3  # clipping takes a little


def test_without_unseen_pictures_nothing_is_called_near(evaluation):
    known, make = evaluation
    scores = copies(make(known[:4], known[:4]).context).scores["copies"]
    assert scores == {"distance": 0, "unseen": 0}


def test_training_pictures_are_as_the_generator_shows_them(evaluation):
    known, make = evaluation
    gray = [np.asarray(Image.fromarray(each).convert("L").convert("RGB")) for each in known]
    scores = copies(make(known, gray, image_channels=1).context).scores["copies"]
    assert scores["distance"] < 2 and scores["unseen"] == 0


def test_ranks_share_the_training_pictures(evaluation, monkeypatch):
    known, make = evaluation
    found = make(known, known).context
    parts = []
    for rank in range(2):
        monkeypatch.setattr(found, "world", SimpleNamespace(rank=rank, size=2, is_main=rank == 0))
        parts += found.training_pictures()
    assert [len(part) for part in parts] == [10, KNOWN - 20, 10]
    assert {each.tobytes() for part in parts for each in part} == {each.tobytes() for each in known}


def test_two_processes_find_what_one_finds(tmp_path):
    """One of them has no batch of its own."""
    path = make_file(tmp_path)
    data, other = shards(tmp_path / "known", pictures(6, 0)), shards(tmp_path / "other", pictures(4, 1))
    flags = ["--model_path", path, "--data_dir", other, "--training_dir", data, "--steps", 2, "--num_samples", 4]
    scores = []
    for ranks in (1, 2):
        report = tmp_path / f"report{ranks}"
        run("evaluate.py", *flags, "--device", "cpu", "--report_dir", report, ranks=ranks)
        scores.append(json.loads((report / "scores.json").read_text())["copies"])
        assert (report / "copies.png").exists()
    assert scores[0] == scores[1] and scores[0]["unseen"] == 4 and np.isfinite(scores[0]["distance"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model_path m.pt --shapes_dir s", "copies needs captioned shards .--data_dir.: set it, or leave --train"),
        (
            "--data_dir d --upsampler_paths u.pt",
            "copies needs a base generator .--model_path.: set it, or leave --training_dir out",
        ),
        (
            "--data_dir d --model_path m.pt --classifier_path c.pt --evaluators captions",
            "is for the evaluator copies: add it",
        ),
    ],
)
def test_training_pictures_without_a_use_are_refused(words, message):
    with pytest.raises(InputError, match=message):
        parse(EvaluateRun, ["--training_dir", "t", *words.split()])
