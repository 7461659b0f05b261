"""What holds of every task: micro-batches, a step that continues, and that nothing waits for the device.

On a GPU, if there is one, waiting is an error; on a CPU, operations that would wait for a GPU are counted.
"""

import contextlib
import copy
from dataclasses import replace

import clip_making
import decoder_making
import pytest
import test_alignment
import test_autoencoding
import test_control_task
import test_decoding
import test_imitation
import test_joint
import test_latent_task
import torch
from benchmarks.regression import loop_of
from marks import slow
from network_making import TEXT, UNET, VOCABULARY, gradient, make_generator, randomize
from torch.testing import assert_close
from waiting import DEVICE, GPU, CountNumbers, CountTransfers, no_waiting, on_gpu, reads

from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.augmentation import Degradation
from diff_dalle.diffusion.log_snr_config import LogSnrConfig
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.distributed.world import ALONE, SINGLE, World
from diff_dalle.models.adapters.lora import Adapted
from diff_dalle.models.dropout import Dropout
from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks import imitation
from diff_dalle.tasks.decoding import DecodingTask
from diff_dalle.tasks.denoising import DenoisingTask, UpsamplingTask
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

PROCESS = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=40, prediction="x_start"))
LOSS_AWARE = DenoisingConfig(schedule_sampler="loss-second-moment")
ADVERSARIAL = {"adversarial_weight": 0.1, "adversarial_start": 0}


def upsampler():
    config = GeneratorConfig(replace(UNET, dropout=0.2), TEXT, LowResConfig(8))
    network = randomize(Generator(config, VOCABULARY))
    return UpsamplingTask(network, PROCESS, LOSS_AWARE, 2, Degradation(0.4, max_level=0.5))


def decoder(i):
    unet = decoder_making.TEXT_UNET if i == 1 else replace(decoder_making.UNET, self_cond=not i)
    whole = decoder_making.make_decoder(3, unet)
    return DecodingTask(decoder_making.make_network(whole, i), whole.stage(i))


#: A task, and a batch.
KINDS = {
    "generator": (
        lambda: DenoisingTask(make_generator(dropout=0.2), PROCESS, LOSS_AWARE),
        test_control_task.make_batch,
    ),
    "generator, aligned": (
        lambda: test_alignment.make_task(PROCESS, until=test_alignment.FIRST + 2, perceptual=0.3),
        test_alignment.make_batch,
    ),
    "upsampler": (upsampler, test_control_task.make_batch),
    "classifier": (clip_making.make_task, lambda: clip_making.make_batch(range(8))),
    "decoder, first": (lambda: decoder(0), lambda: test_decoding.make_batch(side=32)),
    "decoder, texts": (lambda: decoder(1), lambda: test_decoding.make_batch(side=32, **test_decoding.texts())),
    "decoder, last": (lambda: decoder(2), lambda: test_decoding.make_batch(side=32)),
    "stage A": (test_autoencoding.make_task, test_autoencoding.make_batch),
    "stage A, discriminator": (lambda: test_autoencoding.make_task(**ADVERSARIAL), test_autoencoding.make_batch),
    "semantic encoder": (
        lambda: test_autoencoding.make_semantic(0.1),
        lambda: test_autoencoding.make_batch(size=(32, 32)),
    ),
    "stage B": (test_latent_task.stage_b, test_latent_task.make_batch),
    "stage B, adaptive": (
        lambda: test_latent_task.stage_b(LogSnrConfig(loss_weighting=("adaptive",))),
        test_latent_task.make_batch,
    ),
    "stage C": (test_latent_task.stage_c, test_latent_task.make_batch),
    "stage C, CLIP": (lambda: test_latent_task.stage_c(clip=True), lambda: test_latent_task.make_batch(length=4)),
    "stage B, joint": (test_joint.make, test_latent_task.make_batch),
    **{
        f"ControlNet, {name}": (lambda name=name: test_control_task.make_task(name), test_control_task.make_batch)
        for name in ("inpaint", "sr")  # canny asks whether edges still grow
    },
    "LoRA": (lambda: test_imitation.make_task("v"), test_imitation.make_batch),
    "LoRA of latents": (lambda: test_imitation.make_task("latent"), test_imitation.make_batch),
}


def make(kind, device):
    """A task in training on the device, and its batch."""
    task, batch = (make() for make in KINDS[kind])
    for network in (task.train(), *task.companions.values()):
        network.to(device)
    if isinstance(task.model, Adapted):
        task.model.base.to(device)
    return task, batch


def make_loop(kind, microbatch=0, optimizer="adamw", precision="bf16"):
    """A loop on ``DEVICE``, and the kind's batch."""
    task, batch = make(kind, DEVICE)
    world = World(SINGLE, DEVICE)
    trainee = Trainee(task, OptimConfig(optimizer, ema_rate=(0.99,)), precision, world)
    return loop_of(trainee, TrainingConfig(batch_size=len(batch), microbatch=microbatch), world), batch


CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_losses_and_the_gradient_of_the_whole(kind):
    """With dropout of the network and of conditions: all randomness depends on the position alone."""
    (task, batch), found = make(kind, CPU), []
    for layer in task.model.modules():
        if isinstance(layer, Dropout) and kind != "semantic encoder":  # whose previewer has no dropout
            layer.drop = 0.2
    for size in (len(batch), 3, 1):
        task.zero_grad()
        pieces, losses = [(piece, Draw(0, piece.index)) for piece in batch.split(size)], []
        for part in task.parts:
            reports = task.backward(pieces, lambda piece, draw, sync, part=part: task(piece, draw, part), 1.0)
            losses += [report["loss"] for report in reports]
        found.append((torch.cat(losses), gradient(task)))
    losses, whole = found[0]
    atol = 5e-7 if kind in ("classifier", "semantic encoder") else 1e-7  # of the former, elements exceed 1
    for others, pieces in found[1:]:
        assert_close(others, losses, rtol=1e-5, atol=1e-6)
        assert_close(pieces, whole, rtol=1e-4, atol=atol)
        assert (pieces - whole).norm() <= 1e-5 * whole.norm() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_continues_takes_the_same_step(kind):
    """From weights and the optimizer's entry. Companions stay as they are, without gradients."""

    def trainee_of_kind():
        return Trainee(task := make(kind, CPU)[0], OptimConfig(ema_rate=()), "fp32", ALONE), task

    (trainee, task), (other, same) = trainee_of_kind(), trainee_of_kind()
    batch = make(kind, CPU)[1]
    frozen = {name: copy.deepcopy(each.state_dict()) for name, each in task.companions.items()}
    first, second = (Draw(seed, batch.index) for seed in (0, 1))
    trainee.update([(batch, first)], 0)
    states = copy.deepcopy(trainee.states())
    trainee.update([(batch, second)], 1)
    same.model.load_state_dict(states["model"])
    other.load_optimizer(states["optimizer"])
    other.update([(batch, second)], 1)
    for mine, theirs in ((task.state_dict(), same.state_dict()), (task.extra_state(), same.extra_state())):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    for name, each in task.companions.items():
        assert not any(p.requires_grad or p.grad is not None for p in each.parameters())
        assert all(map(torch.equal, each.state_dict().values(), frozen[name].values()))


@contextlib.contextmanager
def watched(batch):
    if GPU:
        with no_waiting():
            yield
    else:
        with reads([batch.index]) as found:
            yield
        assert found == []


@on_gpu
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        ("generator", {"microbatch": 2, "precision": "fp16"}),
        ("classifier", {"microbatch": 2}),
        ("stage C", {"optimizer": "muon"}),
    ],
)
def test_an_update_never_waits(kind, options, monkeypatch):
    if not GPU:  # where imitation predicts fewer rows, which it counts
        monkeypatch.setattr(imitation, "predicted_rows", lambda imitated: torch.arange(len(imitated)))
    loop, batch = make_loop(kind, **options)
    weights = [p for p in loop.trainees[0].task.parameters() if p.requires_grad]
    for _ in range(2):  # the first makes tables, the optimizer's state and, with a GPU, kernels
        loop.update(batch)
    before = [p.detach().clone() for p in weights]
    with watched(batch):
        loop.update(batch)
    assert any(not torch.equal(p, old) for p, old in zip(weights, before, strict=True))
    with reads() as found:  # what is logged is read
        assert loop.trainees[0].scalars()["skipped_steps"] == 0
    assert found


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("generator", "classifier", "decoder, first", "stage B", "ControlNet, sr") else slow(kind)
        for kind in KINDS
    ],
)
def test_copies_to_a_device_are_not_waited_for(kind):
    """Forward and backward pass of each part on the meta device, and what they report; from the second time on."""
    meta = torch.device("meta")
    task, batch = make(kind, meta)
    moved = batch.to(meta)

    def step():
        draw, found = Draw(0, batch.index, meta), {}
        for part in task.parts:
            found |= task.backward([(moved, draw)], lambda piece, draw, sync, part=part: task(piece, draw, part), 1.0)[
                0
            ]
        if task.observed:
            task.observe({name: found[name] for name in task.observed})

    step()
    with CountTransfers() as counting, CountNumbers() as made:
        step()
    assert counting.count and not counting.waiting and not made.count
