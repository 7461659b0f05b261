"""What must hold of training on a GPU too: a run that continues, fp16 after overflows, kernels and compiled blocks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from benchmarks.apart import Apart
from network_making import VOCABULARY, gradient, make_generator, relative
from waiting import DEVICE, GPU, needs_cuda, on_gpu

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.distributed.devices import use_device
from diff_dalle.distributed.world import SINGLE, ProcessInfo, World
from diff_dalle.models import kernels
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.precision import autocast
from diff_dalle.models.units import compile_training
from diff_dalle.randomness import Draw
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

BATCH = 4
ROUNDING = {"fp32": 1e-4, "bf16": 0.05}  # of gradients


def make_task(channels=24):
    """The same weights at each call. In groups of one channel, a bias before a norm would have no gradient."""
    use_device(DEVICE)
    config = {"image_size": 8, "num_channels": channels, "attention_resolutions": (4,), "dropout": 0.2}
    network = to_channels_last(make_generator(**config))
    process = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=50))
    return DenoisingTask(network, process, DenoisingConfig(schedule_sampler="loss-second-moment")).to(DEVICE)


def make_loop(folder, precision, channels=24):
    world = World(SINGLE, DEVICE)
    trainee = Trainee(make_task(channels), OptimConfig(lr=1e-2, warmup_steps=2, ema_rate=(0.5,)), precision, world)
    run = open_run(str(folder), Identity("toy", {}), TrainingConfig)
    return TrainLoop(TrainingConfig(batch_size=BATCH), [trainee], None, run, world)


def make_batch(step=0, rank=0, size=1):
    """The share of a process in a global batch."""
    index = torch.arange(BATCH * step + rank, BATCH * (step + 1), size)
    draw = Draw(9, index)
    tokens = torch.stack([(draw.uniform(f"token {i}") * VOCABULARY).long() for i in range(5)], 1)
    cond = Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    return Batch(draw.normal("image", (3, 8, 8)).tanh(), cond, index)


def train(loop, steps):
    for _ in range(steps):
        loop.update(make_batch(loop.step))


def tensors(loop):
    """Weights, averages and the optimizer's state, as vectors."""
    trainee = loop.trainees[0]
    states = trainee.optimizations[""].optimizer.state.values()
    kept = {
        "weights": list(trainee.task.model.parameters()),
        "averages": list(trainee.emas[0].averages.values()),
        **{name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")},
    }
    return {name: joined(values) for name, values in kept.items()}


def joined(values):
    return torch.cat([each.detach().float().flatten() for each in values])


@on_gpu
def test_a_run_that_continues_equals_one_that_went_on(tmp_path):
    """On a CPU exactly; on a GPU to rounding, which differs each time. AdamW makes steps of it where a weight has no
    gradient, such as keys' biases."""
    whole = make_loop(tmp_path, "bf16")
    train(whole, 2)
    whole.save()
    whole.saving.finish()
    saved = tensors(whole)
    train(whole, 2)
    continued = make_loop(tmp_path, "bf16")
    assert continued.step == 2 and continued.samples == 2 * BATCH
    train(continued, 2)
    expected = tensors(whole)
    for name, found in tensors(continued).items():
        share = (0.25 if name in ("weights", "averages") else 0.05) if GPU else 0
        assert (found - expected[name]).norm() <= share * (expected[name] - saved[name]).norm(), name
    for loop in (whole, continued):
        loop.saving.close()


@on_gpu
def test_fp16_trains_on_after_overflows(tmp_path):
    """Steps whose scaled gradient is infinite change nothing but the scale, which halves."""
    loop = make_loop(tmp_path, "fp16", channels=8)
    scale = loop.trainees[0].optimizations[""].loss_scale.scale
    scale.fill_(2.0**30)
    weights = list(loop.trainees[0].task.parameters())
    before, steps = joined(weights), 0
    while torch.equal(joined(weights), before):
        assert float(scale) == 2.0 ** (30 - steps) and steps < 30
        train(loop, 1)
        steps += 1
    train(loop, 2)
    assert loop.trainees[0].scalars()["skipped_steps"] == steps - 1 > 1 and float(scale) == 2.0 ** (31 - steps)
    assert joined(weights).isfinite().all()
    loop.saving.close()


def losses_of(rank, size, store):
    """Losses and norms of the gradient of three steps in a process of several on one device."""
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    world = World(ProcessInfo("torchrun", rank, size, rank, size), DEVICE)
    trainee, rows = Trainee(make_task(), OptimConfig(lr=1e-3), "fp32", world), []
    for step in range(3):
        batch = make_batch(step, rank, size)
        trainee.update([(batch.to(DEVICE), Draw(0, batch.index, DEVICE))], step)
        found = trainee.scalars()
        rows += [found["loss"], found["grad_norm"]]
    if size > 1:
        torch.distributed.destroy_process_group()
    return rows


@pytest.mark.slow
@on_gpu
def test_two_processes_on_one_device_equal_one(tmp_path):
    processes = Apart(), Apart()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(each.call, 200, losses_of, i, 2, tmp_path / "store") for i, each in enumerate(processes)]
        expected = losses_of(0, 1, None)
        for found in both:
            assert found.result() == pytest.approx(expected, rel=1e-3)
    for each in processes:
        each.close()


def gradient_of(task, precision):
    batch = make_batch()

    def forward(piece, draw, sync):
        with autocast(precision, DEVICE):
            return task(piece, draw)

    task.backward([(batch.to(DEVICE), Draw(0, batch.index, DEVICE))], forward, 1.0)
    return gradient(task.model)


@needs_cuda
@pytest.mark.parametrize("precision", ROUNDING)
def test_a_step_with_kernels_equals_one_without(precision, monkeypatch):
    """Norms, and dropout, which has the same masks."""
    found = gradient_of(make_task(), precision)
    monkeypatch.setattr(kernels, "run_on", lambda device: False)
    assert 0 < relative(found, gradient_of(make_task(), precision)) < ROUNDING[precision]


@needs_cuda
@pytest.mark.parametrize("precision", ROUNDING)
def test_a_compiled_step_equals_an_eager_one(precision):
    compiled = make_task()
    compile_training(compiled)
    assert 0 < relative(gradient_of(compiled, precision), gradient_of(make_task(), precision)) < ROUNDING[precision]
