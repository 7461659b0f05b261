"""A step that was not finite is computed again from a checkpoint before it."""

import json

import pytest
import torch
from script_running import run, train

from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

FLAGS = {"iterations": 4, "batch_size": 6, "microbatch": 3, "save_interval": 2, "log_interval": 1}
BAD = 6 * 3 + 2  # a position in step 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    write_shapes(ShapesConfig(image_size=16, train_samples=32, val_samples=8, samples_per_shard=16), str(folder))
    return folder / "train"


@pytest.fixture()
def poisoned(monkeypatch):
    """A function of the losses' input that spoils the samples at ``BAD``."""
    losses = DenoisingTask.losses

    def make(spoil):
        def spoiled(self, batch, draw):
            return spoil(self, losses, batch, draw, (batch.index == BAD).to(batch.images.device))

        monkeypatch.setattr(DenoisingTask, "losses", spoiled)

    return make


def in_the_loss(task, losses, batch, draw, bad):
    values = losses(task, batch, draw)
    return values | {"loss": values["loss"] + torch.where(bad, torch.inf, 0.0)}


def in_the_network(task, losses, batch, draw, bad):
    module = task.model.unet.out_conv
    handle = module.register_forward_hook(lambda _, __, out: out + torch.where(bad.any(), torch.nan, 0.0), prepend=True)
    try:
        return losses(task, batch, draw)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("spoil", "place"), [(in_the_loss, "the forward pass: the output of the task"), (in_the_network, "unet.out_conv")]
)
def test_a_step_is_computed_again_and_its_first_bad_value_found(shards, tmp_path, poisoned, spoil, place):
    poisoned(spoil)
    train(tmp_path, shards, **FLAGS)
    (record,) = map(json.loads, (tmp_path / "flight.jsonl").read_text().splitlines())
    assert record["step"] == 4 and record["ranks"][0]["position"] == list(range(18, 24))
    out = run("replay.py", "--logdir", tmp_path, "--device", "cpu").stdout
    assert "Step 4 " in out and "computed again from the checkpoint of step 2." in out
    assert "The record is reproduced." in out and "shapes-" in out
    assert place in out.splitlines()[-1], out
    rows = [line.split(" | ") for line in out.splitlines() if line[2:4].isdigit()]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(18, 24)) and all(row[2] for row in rows)
    recorded = dict(zip(record["ranks"][0]["position"], record["ranks"][0]["t"], strict=True))
    assert [float(row[3]) for row in rows] == list(recorded.values())
    missing = run("replay.py", "--logdir", tmp_path, "--step", 3, "--device", "cpu", ok=False)
    assert missing.returncode == 2 and "no record of step 3, only of steps 4" in missing.stderr


def test_a_record_that_does_not_come_again_is_said(shards, tmp_path, poisoned, monkeypatch):
    poisoned(in_the_loss)
    train(tmp_path, shards, **FLAGS)
    monkeypatch.undo()
    out = run("replay.py", "--logdir", tmp_path, "--device", "cpu").stdout
    assert "NOT reproduced" in out and "All values are finite this time." in out


def test_a_step_of_two_processes_is_computed_in_one(shards, tmp_path):
    """Recorded by hand: what two processes write for a step that one process takes with twice the batch."""
    train(tmp_path, shards, ranks=2, **{**FLAGS, "batch_size": 3, "microbatch": 0})
    ranks = [{"position": list(range(18 + rank, 24, 2)), "loss": [0.0] * 3, "t": [0] * 3} for rank in (0, 1)]
    record = {"step": 4, "trainee": "", "grad_norm": "nan", "loss_scale": 1.0, "ranks": ranks}
    (tmp_path / "flight.jsonl").write_text(json.dumps(record) + "\n")
    out = run("replay.py", "--logdir", tmp_path, "--device", "cpu").stdout
    assert "from the checkpoint of step 2" in out and out.count("shapes-") >= 6 and "NOT reproduced" in out
    record["ranks"] = ranks[:1]
    (tmp_path / "flight.jsonl").write_text(json.dumps(record) + "\n")
    refused = run("replay.py", "--logdir", tmp_path, "--device", "cpu", ok=False)
    assert refused.returncode == 2 and "the global batch was not always 3 samples" in refused.stderr, refused.stderr
