"""How the drill compares runs."""

import json
import random

import pytest
import torch

from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import RunFolder
from drills.contract import Deviation
from drills.place import Place, Result, digest, saved
from drills.processes import Outcome


class FakeBench:
    quick, seed = True, 0

    def __init__(self, folder, result):
        self.world, self.result = folder, result

    def reference(self, kind, changed):
        return self.result


def save_run(logdir, step, weights, losses):
    run = RunFolder(Identity("generator", {}, None), path=str(logdir))
    logdir.mkdir(exist_ok=True)
    run.save(step, step * 8, {"model": {"w": weights}, "optimizer": {"m": weights + 1}})
    rows = [json.dumps({"step": i + 1, "loss": loss}) for i, loss in enumerate(losses)]
    (logdir / "progress.jsonl").write_text("\n".join(rows) + "\n")


def make_place(folder, result=None):
    return Place(FakeBench(folder, result), "generator", folder, random.Random(0))


def test_a_digest_tells_every_value_apart():
    value = {"w": torch.zeros(3), "n": [1, 2.0, "x", None], "b": True}
    same = {"b": True, "n": [1, 2.0, "x", None], "w": torch.zeros(3)}
    assert digest(value) == digest(same)
    tiny = torch.zeros(3)
    tiny[1] = 1e-45
    others = ({**value, "w": tiny}, {**value, "w": torch.zeros(3, 1)}, {**value, "w": torch.zeros(3).double()})
    others = (*others, {**value, "n": [1, 2.0, "x"]}, {**value, "b": False}, {**value, "c": 1}, {"n": value["n"]})
    assert len({digest(each) for each in (value, *others)}) == 1 + len(others)


def test_runs_are_equal_bit_for_bit_or_not(tmp_path):
    save_run(tmp_path / "run", 4, torch.ones(3), [0.5] * 4)
    result = saved(tmp_path / "run")
    place = make_place(tmp_path, result)
    assert place.equal() == "equal" and place.saved_all() == 4 == place.logged_step()
    save_run(tmp_path / "run", 4, torch.ones(3) * (1 + 1e-7), [0.5] * 4)
    with pytest.raises(Deviation, match="the state differs"):
        place.equal()
    with pytest.raises(Deviation, match="ended at step 4, not 5"):
        make_place(tmp_path, Result(5, result.state, {})).equal()


def test_a_run_without_a_checkpoint_has_saved_nothing(tmp_path):
    place = make_place(tmp_path)
    assert place.saved_step() == 0
    (tmp_path / "run").mkdir()
    RunFolder(Identity("generator", {}, None), path=str(tmp_path / "run")).write_record()
    assert place.saved_step() == 0
    with pytest.raises(Deviation, match="no checkpoint"):
        place.saved()


def test_losses_are_equal_up_to_rounding(tmp_path):
    save_run(tmp_path / "run", 4, torch.ones(3), [0.5, 0.5 + 4e-6])
    assert "losses equal" in make_place(tmp_path, Result(4, "", {1: 0.5, 2: 0.5})).close()
    for wrong in ({1: 0.5, 2: 0.51}, {1: 0.5}):
        with pytest.raises(Deviation):
            make_place(tmp_path, Result(4, "", wrong)).close()


def test_an_unreadable_checkpoint_and_lost_steps_are_deviations(tmp_path):
    save_run(tmp_path / "run", 4, torch.ones(3), [0.5] * 9)
    place = make_place(tmp_path)
    place.lost_little(12)
    with pytest.raises(Deviation, match="9 steps done, 4 saved"):
        place.saved_all()
    with pytest.raises(Deviation, match="9 steps are lost"):
        place.lost_little(13)
    path = tmp_path / "run" / "opt000004.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Deviation, match="cannot be read"):
        place.saved_step()


@pytest.mark.parametrize(
    ("status", "output"),
    [
        (1, "error: the disk is full"),
        (2, "error: something else"),
        (2, "Traceback (most recent call last)\nerror: disk"),
    ],
)
def test_a_refusal_is_a_sentence_with_status_2(tmp_path, status, output):
    place = make_place(tmp_path)
    place.refused(Outcome(2, "error: the disk is full\n", 0.0), "disk")
    with pytest.raises(Deviation):
        place.refused(Outcome(status, output, 0.0), "disk")
