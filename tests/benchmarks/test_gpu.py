"""Every row of the table for GPUs is computed on the CPU, at a tiny size."""

from dataclasses import replace

import pytest
import torch
from network_making import randomize

from benchmarks import gpu
from benchmarks.baseline_unet import BaselineUNet
from benchmarks.gpu import Row, Workload
from diff_dalle.models.cost import count_flops
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.unet import UNet, UNetConfig

TINY = UNetConfig(image_size=8, num_channels=32, num_res_blocks=1, channel_mult=(1,), attention_resolutions=(8,))
WORK = Workload(
    torch.device("cpu"),
    TINY,
    TINY,
    factor=2,
    text=TextEncoderConfig(enc_attn_dim=8, enc_depth=1, enc_heads=2, text_length=4),
    batches=(2, 2, 2),
    steps=2,
    repeats=1,
    warm_up=1,
    matrix=16,
    backend="eager",
)


def cells(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_every_row_is_measured(monkeypatch):
    """What is compiled is only noted: capturing takes long, and two rows do it below."""
    compiled = []
    monkeypatch.setattr(gpu, "_free", lambda work: None)  # which takes longer than a row
    monkeypatch.setattr(gpu, "compile_training", lambda task, backend: compiled.append(backend))
    monkeypatch.setattr(torch, "compile", lambda plain, backend, fullgraph: compiled.append(backend) or plain)
    first, header, *lines = gpu.tables(WORK)
    assert first.startswith("cpu, torch ") and cells(header.splitlines()[0]) == list(gpu.COLUMNS)
    rows = [cells(line) for line in lines]
    assert [tuple(row[:3]) for row in rows] == [(row.work, row.form, row.precision) for row in gpu.rows(WORK)]
    forms = {(row[0].split(",")[0], row[1], row[2]) for row in rows}
    assert ("training step", "published form", "bf16") in forms and ("training step", "compiled", "bf16") in forms
    assert ("sampling", "compiled, half weights", "bf16") in forms and len(rows) == 29
    for row in rows:
        assert row[3] in ("1", "2") and float(row[4].replace(",", "")) > 0, row
        assert row[5].endswith("%") == row[0].startswith("training"), row
    assert compiled == ["eager"] * sum("compiled" in row[1] for row in rows)


@pytest.mark.parametrize("work", ["training step, generator", "sampling"])
def test_a_compiled_row_is_captured(work):
    (row, *_) = [row for row in gpu.rows(WORK) if row.work.startswith(work) and row.form.startswith("compiled")]
    batch, images, *_ = gpu.measured_cells(WORK, row, 1.0)
    assert batch == "2" and float(images.replace(",", "")) > 0


def test_without_cuda_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (text,) = gpu.tables()
    assert text.startswith("skipped: torch finds no CUDA device")


def test_no_row_begins_when_time_is_up(monkeypatch):
    monkeypatch.setattr(gpu, "measured_cells", lambda *_: pytest.fail("a row was measured"))
    _, _, *lines = gpu.tables(WORK, minutes=0.0)
    assert len(lines) == 29 and all(cells(line)[4] == "time is up" for line in lines)


def test_a_row_that_does_not_fit_has_half_the_batch():
    tried = []

    def build(batch):
        tried.append(batch)
        if batch > limit:
            raise torch.OutOfMemoryError
        return lambda: None

    row = Row("", "", "bf16", 8, build, images=5)
    limit = 2
    assert gpu.measured_cells(WORK, row, 1.0)[0] == "2" and tried == [8, 4, 2]
    limit = 0
    assert gpu.measured_cells(WORK, row, 1.0)[:2] == ["1", "out of memory"]


def test_another_failure_is_named():
    def build(batch):
        raise RuntimeError("no compiler\nmore")

    assert gpu.measured_cells(WORK, Row("", "", "bf16", 8, build), 1.0)[:2] == ["8", "RuntimeError: no compiler"]


def test_images_and_their_share_of_the_peak_follow_from_the_time(monkeypatch):
    monkeypatch.setattr(gpu, "_run", lambda *_: (0.5, "1.0"))
    row = Row("", "", "bf16", 8, lambda batch: None, images=5, flops=30)
    assert gpu.measured_cells(WORK, row, 1000.0) == ["8", "80.0", "48%", "1.0"]


def test_flops_count_both_passes_of_the_network_that_is_trained():
    """Three times a forward pass, less the gradient of the images, which nobody needs; more with a low-res input."""
    plain = gpu.flops_per_image(TINY)
    with torch.device("meta"):
        forward = count_flops(UNet(TINY), lambda model: model(torch.empty(1, 3, 8, 8), torch.empty(1)))
    assert plain == pytest.approx(3 * forward, rel=0.05)
    assert gpu.flops_per_image(TINY, 2) > plain


@pytest.mark.parametrize("form", ["ours", "published"])
@pytest.mark.parametrize("factor", [0, 2])
def test_the_steps_train(form, factor, monkeypatch):
    """They change the weights, in both forms."""
    made = []
    monkeypatch.setattr(gpu, "network", lambda *args, make=gpu.network: made.append(make(*args)) or made[-1])
    monkeypatch.setattr(gpu, "BaselineUNet", lambda *a, **o: made.append(BaselineUNet(*a, **o)) or made[-1])
    options = {"compiled": False} if form == "ours" else {}
    step = getattr(gpu, form)(WORK, TINY, factor, "fp32", batch_size=2, **options)
    before = torch.cat([p.detach().flatten() for p in made[0].parameters()])
    step()
    assert not torch.equal(torch.cat([p.detach().flatten() for p in made[0].parameters()]), before)


def test_sampling_uses_half_weights_and_the_steps_asked_for(monkeypatch):
    made, calls = [], []
    monkeypatch.setattr(
        gpu, "network", lambda *a, make=gpu.network, **o: made.append(randomize(make(*a, **o))) or made[-1]
    )
    for half in (False, True):
        sample = gpu.sampling(replace(WORK, steps=4), "bf16", half, False, 2)
        handle = made[-1].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
        assert sample().shape == (2, 3, 8, 8)
        handle.remove()
        assert any(p.dtype == torch.bfloat16 for p in made[-1].parameters()) == half
    assert calls == [4] * 8  # both halves of guidance in one batch
