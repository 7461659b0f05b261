"""Every row of the table for GPUs is computed on the CPU, at a tiny size; its budget, failures and figures."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from marks import slow
from network_making import randomize

from benchmarks import gpu, gpu_steps, latent, transformer
from benchmarks import gpu_subjects as full
from benchmarks.apart import described
from benchmarks.gpu import Measured, Row, Workload, measured
from benchmarks.gpu_subjects import Classifier, Pixels, flops_per_image
from diff_dalle.models import kernels
from diff_dalle.models.cost import count_flops
from diff_dalle.models.latent.config import LatentTextConfig
from diff_dalle.models.noised_clip import NoisedClipConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig
from diff_dalle.models.unet import UNet

CPU = torch.device("cpu")
UNET = DenoiserConfig(
    image_size=8,
    num_channels=32,
    num_res_blocks=1,
    channel_mult=(1,),
    attention_resolutions=(8,),
    num_head_channels=16,
)
GENERATOR = Pixels("generator", 2, UNET)
CLIP = NoisedClipConfig(
    image_size=8,
    classifier_width=32,
    classifier_depth=1,
    classifier_channel_mult=(1,),
    classifier_attention_resolutions=(8,),
    classifier_enc_attn_dim=8,
    classifier_enc_depth=1,
    classifier_enc_heads=2,
    text_length=4,
)


def thin(subject):
    """A subject of full size with narrow levels and few positions."""
    config = subject.config
    small = {
        "widths": (8,) * config.depth,
        "heads": tuple(min(heads, 2) for heads in config.heads),
        "down_blocks": (1,) * config.depth,
        "up_blocks": (1,) * config.depth,
        "cond_width": 8,
        "text": LatentTextConfig(text_length=3),
    }
    return replace(subject.with_config(**small), batch_size=2, side=4 if config.patch_size == 1 else 16)


WORK = Workload(
    CPU,
    GENERATOR,
    replace(GENERATOR, name="upsampler", factor=2),
    thin(full.STAGE_C),
    thin(full.STAGE_B),
    Classifier("classifier", 2, CLIP),
    thin(full.STAGE_C_LARGE),
    replace(GENERATOR, text=TextEncoderConfig(enc_attn_dim=8, enc_depth=1, enc_heads=2, text_length=4)),
    steps=2,
    matrix=16,
    backend="eager",
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in (("TOKENS", 16), ("WIDTH", 64), ("HEAD", 32)):
        monkeypatch.setattr(gpu_steps, name, value)
    for name, value in (("REPEATS", 1), ("WARM_UP", 1)):
        monkeypatch.setattr(gpu, name, value)


def here(seconds, function, *args):
    """As ``Apart.call``, in this process."""
    try:
        return function(*args)
    except Exception as error:
        raise RuntimeError(described(error)) from None


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("|") else line


def table(seconds=9999.0, call=here, **options):
    """The line above the table, and the cells of its rows by work, form and batch in order."""
    first, header, *lines = gpu.tables(seconds, WORK, call, **options)
    assert cells(header.splitlines()[0]) == list(gpu.COLUMNS)
    return first, [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.slow
def test_every_row_is_measured(monkeypatch):
    """What is compiled is only noted: capturing takes long, and two rows do it below."""
    compiled = []
    monkeypatch.setattr(gpu, "free", lambda device: None)  # which takes longer than a row
    monkeypatch.setattr(gpu_steps, "compile_training", lambda task, backend: compiled.append(backend))
    monkeypatch.setattr(torch, "compile", lambda plain, backend, fullgraph, mode: compiled.append(mode) or plain)
    first, rows = table()
    assert first.startswith("cpu, torch ") and "large bf16 product" in first
    assert [row[:2] for row in rows] == [[row.work, row.form] for row in gpu.rows(WORK)]
    published = {(row[0], row[2]) for row in rows if row[1] == gpu.PUBLISHED}
    for work, form, batch, rate, mfu, peak, seconds, ratio in rows:
        if form == "diffusers' U-Net" and find_spec("diffusers") is None:
            assert rate == "ModuleNotFoundError: No module named 'diffusers'"
            continue
        assert batch in ("1", "2") and float(rate.replace(",", "")) > 0 and float(seconds) >= 0, (work, form, rate)
        assert mfu.endswith("%") == work.startswith("training") and peak == ""
        assert (float(ratio) > 0) if (work, batch) in published else ratio == ""
        assert form != gpu.PUBLISHED or ratio == "1.00"
    captured = [row[1] for row in rows if row[1].startswith("compiled")]
    assert len(captured) == 10 and compiled == ["eager"] * 8 + ["reduce-overhead", "default"]


def test_the_order_is_that_of_interest():
    """Eager rows of everything, each after its published form; then variants; what saves memory at the end."""
    order = [(row.work.split(",")[0], row.work.split(", ")[1], row.form, row.batch) for row in gpu.rows(WORK)]
    eager = list(itertools.takewhile(lambda row: row[2] != "eager, plain norms", order))
    subjects = ["generator", "upsampler", "stage C 1B", "stage B 700M", "classifier"]
    forms = {"published form", "eager", "diffusers' U-Net", "torch's transformer"}
    assert [row[1] for row in eager if row[2] == "eager"] == subjects
    assert {row[2] for row in eager if row[1] == "generator"} == forms
    assert not any("compiled" in row[2] for row in eager) and len(set(order)) == len(order) == 31
    kinds = [row[0] if row[2] != "eager, use_checkpoint" else "memory" for row in order]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["training", "sampling", "memory"]


@pytest.mark.parametrize("work", ["training, generator", slow("sampling")])
def test_a_compiled_row_is_captured(work):
    row = next(row for row in gpu.rows(WORK) if row.work.startswith(work) and row.form.startswith("compiled"))
    assert measured(CPU, row.build, row.batch).batch == 2


def test_without_cuda_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (text,) = gpu.tables(60)
    assert text.startswith("skipped: torch finds no CUDA device")


def test_the_budget_is_kept():
    """Of 100 s: a row of 3 s after another; none takes more than 30 s or than is left, none that compiles begins after
    60 s, and none after 100 s."""
    now, given = [0.0], []

    def call(seconds, function, *args):
        if function is gpu.name_and_peak:
            return "device", 1.0
        given.append((now[0], seconds, args[1]))
        now[0] += 3
        return Measured(2, 1.0, None, 0.0), None

    _, rows = table(100.0, call, clock=lambda: now[0])
    for start, seconds, number in given:
        assert seconds == min(30, 100 - start) and start < (60 if rows[number][1].startswith("compiled") else 100)
    begun = {number for *_, number in given}
    late = [row for number, row in enumerate(rows) if number not in begun]
    assert late and all(row[3] == "time is up" and not any(row[4:]) for row in late)
    assert all(row[1].startswith("compiled") for row in late[:-1]) and rows[-1][3] == "1.0"
    now[0] = 0
    _, rows = table(20.0, call, clock=lambda: now[0])
    assert [row[3] for row in rows[:8]] == ["1.0"] * 7 + ["time is up"]


def test_a_failure_is_a_row_and_not_the_end():
    errors = [TimeoutError("took more than 9 s"), ChildProcessError("the process ended with status -11")]
    errors += [RuntimeError("AcceleratorError: CUDA error")]
    queue = list(errors)

    def call(seconds, function, *args):
        if queue:
            raise queue.pop(0)
        return Measured(2, 4.0, None, 0.0), 30

    first, rows = table(call=call)
    assert first.startswith("cpu (took more than 9 s), torch")
    assert [row[3] for row in rows[:3]] == [str(errors[1]), str(errors[2]), "4.0"]
    assert rows[2][4] == "nan%" and rows[2][-1] == "" and rows[3][3] == "4.0"


def test_a_row_that_does_not_fit_has_half_the_batch():
    tried = []

    def build(device, batch):
        tried.append(batch)
        if batch > limit:
            raise torch.OutOfMemoryError
        return lambda: None

    limit = 2
    assert measured(CPU, build, 8).batch == 2 and tried == [8, 4, 2]
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        measured(CPU, build, 2)


def test_cells_follow_from_what_was_measured():
    row, found = Row("", "", 8, None, steps=5), Measured(4, 16.0, 1.25, 2.04)
    assert row.cells(found, 30, 1000.0, Measured(8, 32.0, None, 0.0)) == ["4", "80.0", "48%", "1.2", "2.0", "0.50"]
    assert row.cells(replace(found, peak=None), None, 1000.0, None) == ["4", "80.0", "", "", "2.0", ""]


def test_seconds_are_those_of_one_step(monkeypatch):
    now = itertools.count(step=4.0)  # seconds between two looks at the clock
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(gpu, "REPEATS", 8)
    steps = []
    found = measured(CPU, lambda device, batch: lambda: steps.append(batch), 6)
    assert found == Measured(6, 6 / (4 / 8), None, 4.0) and len(steps) == 1 + 1 + 8


# ------------------------------------------------------------------------------------------------- what is measured


def test_flops_count_both_passes_of_the_network_that_is_trained():
    """Three times a forward pass, less the gradient of the images, which nobody needs; more with a low-res input."""
    plain = flops_per_image(GENERATOR)
    with torch.device("meta"):
        forward = count_flops(UNet(UNET), lambda model: model(torch.empty(1, 3, 8, 8), torch.empty(1)))
    assert plain == pytest.approx(3 * forward, rel=0.05)
    assert flops_per_image(WORK.upsampler) > plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Transformer", *(["DiffusersUNet"] if find_spec("diffusers") else [])])
def test_others_need_the_same_flops(name):
    """diffusers' U-Net with attention in all levels but the first, as at full size."""

    class Other(Pixels):
        def network(self):
            return getattr(gpu_steps, name)(ours)

    config = DenoiserConfig(
        image_size=32,
        num_channels=64,
        num_res_blocks=1,
        channel_mult=(1, 2, 3),
        attention_resolutions=(16, 8),
        num_head_channels=64,
        resblock_updown=True,
    )
    ours = GENERATOR if name == "Transformer" else Pixels("", 1, config)
    assert flops_per_image(Other("", 1, ours.config)) == pytest.approx(flops_per_image(ours), rel=0.03)


@pytest.mark.parametrize("name", ["stage_c", "stage_b"])
def test_published_stages_are_the_same_function_with_what_full_sizes_have(name, monkeypatch):
    config = getattr(WORK, name).config
    monkeypatch.setitem(latent.STAGES, name, config)
    monkeypatch.setitem(latent.SIDES, config.channels, 16)
    monkeypatch.setattr(latent, "BATCH_SIZE", 3)
    for found, most in latent.gate(name).values():
        assert 0 < found <= most


STEPS = {
    "generator": (GENERATOR, gpu_steps.ours),
    "upsampler": (WORK.upsampler, gpu_steps.ours),
    "stage C": (WORK.stage_c, gpu_steps.ours),
    "classifier": (WORK.classifier, gpu_steps.ours),
    "published generator": (GENERATOR, gpu_steps.published),
    "published upsampler": (WORK.upsampler, gpu_steps.published),
    "published stage B": (WORK.stage_b, gpu_steps.published),
    "transformer": (GENERATOR, gpu_steps.transformer),
    **({"diffusers": (GENERATOR, gpu_steps.diffusers_unet)} if find_spec("diffusers") else {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_trains(name, monkeypatch):
    """It changes every weight that has a gradient, and there are few without: zero-initialized layers hide others."""
    subject, make = STEPS[name]
    made = []
    own = type(subject).task
    monkeypatch.setattr(
        type(subject), "task", lambda self, network: made.append(randomize(network)) or own(self, network)
    )
    step = make(subject, CPU, 2)
    weights = list(made[-1].parameters())  # after those on the meta device, whose FLOPs are counted once
    before = [p.detach().clone() for p in weights]
    step()
    changed = [not torch.equal(p, old) for p, old in zip(weights, before, strict=True)]
    assert sum(changed) > 0.8 * len(changed)


def test_variants_are_what_they_are_called(monkeypatch):
    tasks = []
    monkeypatch.setattr(gpu_steps, "loop_of", lambda trainee, *_: tasks.append(trainee))
    for options in ({"precision": "fp16"}, {"optimizer": "muon"}, {"dropout": 0.1}, {"use_checkpoint": True}, {}):
        gpu_steps.ours(GENERATOR, CPU, 2, **options)
    half, muon, dropped, checkpointed, plain = tasks
    assert [each.precision for each in tasks] == ["fp16", *["bf16"] * 4]
    assert muon.optimizations[""].config.optimizer == "muon" and half.optimizations[""].loss_scale.dynamic
    assert [each.task.model.config.unet.dropout for each in (dropped, plain)] == [0.1, 0.0]
    assert [each.task.model.config.unet.use_checkpoint for each in (checkpointed, plain)] == [True, False]


def test_plain_norms_are_without_kernels():
    seen, before = [], kernels.run_on

    def build(device, batch):
        seen.append(kernels.run_on(torch.device("cuda")))
        return lambda: seen.append(kernels.run_on(torch.device("cuda")))

    step = gpu_steps.with_plain_norms(build)(CPU, 2)
    step()
    assert seen == [False, False] and kernels.run_on is before


def test_sampling_takes_the_steps_asked_for_in_half_precision(monkeypatch):
    made, calls = [], []
    own = Pixels.network
    monkeypatch.setattr(Pixels, "network", lambda self: made.append(randomize(own(self))) or made[-1])
    sample = gpu_steps.sampling(WORK.sampled, 4, CPU, 2)
    made[0].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    assert sample().shape == (2, 3, 8, 8)
    assert any(p.dtype == torch.bfloat16 for p in made[0].parameters())
    assert calls == [4] * 4  # both halves of guidance in one batch


# ---------------------------------------------------------------------------------------- the transformer on the CPU


def test_both_sides_need_the_same_flops():
    ((found, allowed),) = transformer.gate().values()
    assert 0 <= found <= allowed


@pytest.mark.slow
def test_the_gate_sees_another_layer(monkeypatch):
    deeper = replace(transformer.SUBJECT, config=replace(transformer.NETWORK, depth=transformer.NETWORK.depth + 1))
    monkeypatch.setattr(transformer, "flops_per_image", lambda subject: flops_per_image(deeper))
    ((found, allowed),) = transformer.gate().values()
    assert found > allowed


@pytest.mark.parametrize("side", [transformer.torchs, transformer.ours])
def test_a_step_of_either_side_runs(side, monkeypatch):
    monkeypatch.setattr(
        transformer, "SUBJECT", replace(transformer.SUBJECT, config=replace(transformer.NETWORK, depth=2))
    )
    monkeypatch.setattr(transformer, "BATCH_SIZE", 1)
    side()()
