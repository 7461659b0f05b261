"""What the table of a LoRA's memory counts."""

import pytest

from benchmarks import lora_memory
from benchmarks.lora_memory import adapted, file_sizes, full, held_bytes, memory_of_run, write_files
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.planning.calibration import Steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("lora"))
    write_files(folder)
    return folder


def test_a_lora_holds_the_base_once_and_four_more_copies_of_its_own(folder):
    """Gradients, AdamW's two moments and an average; the base's weights have none of them. Its file is small."""
    lora, base = file_sizes(folder)
    assert 0.01 * base < lora <= 0.02 * base
    steps = Steps.of(adapted(folder, 2), ALONE)
    steps.seconds(1)
    (trainee,) = steps.loop.trainees
    own = sum(p.nbytes for p in trainee.task.parameters())
    frozen = sum(p.nbytes for p in trainee.task.model.base.parameters() if not p.requires_grad)
    assert 0 < 20 * own < frozen
    assert abs(held_bytes(trainee) - (frozen + 5 * own)) < 0.01 * frozen  # counters of steps


@pytest.mark.slow
def test_a_step_of_a_lora_takes_less_than_one_of_all_weights(folder):
    lora, whole = (memory_of_run(build, folder, 2) for build in (adapted, full))
    assert lora.held < 0.3 * whole.held and lora.held < lora.tensors < 0.7 * whole.tensors
    assert 0 < lora.before <= lora.process


def test_the_table_names_both_sides(folder, monkeypatch):
    sides = {
        adapted: lora_memory.Memory(1_000_000, 2_000_000, 3_000_000, 0),
        full: lora_memory.Memory(*[4_000_000] * 4),
    }
    monkeypatch.setattr(lora_memory, "memory_of_run", lambda build, folder: sides[build])
    monkeypatch.setattr(lora_memory, "in_fresh_process", lambda function, *given: function(*given))
    (text,) = lora_memory.tables()
    assert "| all tensors at the peak of a step | 2.0 | 4.0 | 0.500 |" in text and "| the file |" in text
