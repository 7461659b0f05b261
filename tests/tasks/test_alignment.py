"""Alignment with an encoder's features, and perceptual losses of predicted images."""

from functools import partial

import pytest
import torch
from clip_making import make_clip
from network_making import TRANSFORMER, captions, make_generator, pixels, seeded, without_gradient
from refusing import refused
from test_control_task import FLOW
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.batch import Batch
from diff_dalle.diffusion import DiffusionConfig
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.patches import PatchEncoder
from diff_dalle.randomness import Draw
from diff_dalle.tasks.alignment import ENCODER, Alignment, Projector, find_block, on_grid, tokens_of
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.tasks.perceptual import NETWORK, Perceptual, feature_distance
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.trainee import Trainee

N, FIRST = 4, 10
EPS = training_process(DiffusionConfig(diffusion_steps=40, prediction="eps"))
OPTIM = OptimConfig(lr=1e-2, ema_rate=(0.5,))


def make_batch() -> Batch:
    return Batch(pixels(N, 3, 16, 16), captions((3, 5, 2, 4)), torch.arange(FIRST, FIRST + N))


def make_encoder() -> PatchEncoder:
    return PatchEncoder(make_clip(), 8, 8, square=True)


def make_task(process=EPS, weight=0.5, until=None, block="", perceptual=0.0, snr=0.2, **network) -> DenoisingTask:
    task = DenoisingTask(make_generator(**network), process, DenoisingConfig())
    if weight:
        encoder = make_encoder()
        module = find_block(task.model, block)
        channels = 8 if block else 16
        torch.manual_seed(0)
        task.alignment = Alignment(module, Projector(channels, 32, encoder.channels), weight, until)
        task.add_companion(ENCODER, encoder)
    if perceptual:
        encoder = make_encoder()
        task.perceptual = Perceptual(task.denoiser, process, feature_distance(encoder), perceptual, snr)
        task.add_companion(NETWORK, encoder)
    return task.train()


def losses(task, batch=None):
    batch = batch or make_batch()
    return task.losses(batch, Draw(0, batch.index))


plain = partial(make_task, weight=0)
PROCESSES = pytest.mark.parametrize("process", [EPS, FLOW], ids=["steps", "flow"])


@PROCESSES
def test_the_loss_is_that_of_the_diffusion_and_one_minus_the_cosine(process):
    task, batch = make_task(process), make_batch()
    taken = []
    task.model.unet.encoder.middle.register_forward_hook(lambda module, inputs, output: taken.append(output))
    found, alone = losses(task), losses(plain(process))
    tokens = task.alignment.projector(taken[0].flatten(2).mT)
    features = on_grid(task.companions[ENCODER](batch.images), taken[0].shape[2:]).flatten(2).mT
    cosine = (F.normalize(tokens, dim=-1) * F.normalize(features, dim=-1)).sum(-1).mean(1)
    assert_close(found["alignment"], 1 - cosine)
    assert_close(found["loss"], alone["loss"] + 0.5 * (1 - cosine))
    for name in alone.keys() - {"loss"}:
        assert_close(found[name], alone[name], rtol=0, atol=0, equal_nan=True)
    assert (1 - cosine > 0.1).all() and taken[0].shape[2:] != task.companions[ENCODER](batch.images).shape[2:]


def test_held_out_losses_and_a_network_that_is_evaluated_are_not_aligned():
    task, batch = make_task(perceptual=0.3).eval(), make_batch()
    with torch.no_grad():
        found = task.held_out(batch, Draw(0, batch.index))
        expected = plain().eval().held_out(batch, Draw(0, batch.index))
    assert found.keys() == expected.keys()
    for name in found:
        assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True)
    assert task.alignment.kept._latest is None


def test_gradients_reach_the_network_up_to_the_block_and_the_projector_not_the_encoder():
    task = make_task()
    losses(task)["alignment"].sum().backward()
    missing = without_gradient(task.model)
    assert not [name for name in missing if name.startswith("unet.encoder")], missing
    assert {name for name, _ in task.model.named_parameters() if "output_blocks" in name} <= set(missing)
    assert not without_gradient(task.alignment.projector)
    encoder = task.companions[ENCODER]
    assert not any(each.training for each in encoder.modules())
    assert all(p.grad is None and not p.requires_grad for p in encoder.parameters())
    assert len(task.state_dict()) == len([*task.model.parameters(), *task.alignment.projector.parameters()])


def test_a_step_trains_the_projector_which_no_file_of_weights_holds():
    task = make_task()
    trainee, batch = Trainee(task, OPTIM, "fp32", ALONE), make_batch()
    before = [p.detach().clone() for p in task.alignment.projector.parameters()]
    trainee.update([(batch, Draw(0, batch.index))], 0)
    assert all(not torch.equal(p, old) for p, old in zip(task.alignment.projector.parameters(), before, strict=True))
    states = trainee.states()
    assert states["model"].keys() == states["ema_0.5"].keys() == plain().model.state_dict().keys()
    saved = states["optimizer"]["modules"]["projector"]
    assert saved.keys() == task.alignment.projector.state_dict().keys()


def test_alignment_ends_with_a_sample():
    """From there on with a gradient of 0, also for the network, and without the encoder."""
    half, never, ended = (make_task(until=until) for until in (FIRST + 2, None, FIRST))
    expected = losses(never)["alignment"]
    assert_close(losses(half)["alignment"], torch.where(torch.arange(N) < 2, expected, 0))
    ended.companions[ENCODER] = nn.Identity().eval()
    ended.companions[ENCODER].forward = lambda images: pytest.fail("the encoder is called")
    found, alone = losses(ended), losses(plain())
    assert torch.equal(found["loss"], alone["loss"]) and not found["alignment"].any()
    found["loss"].sum().backward()
    reference = plain()
    losses(reference)["loss"].sum().backward()
    for (name, one), other in zip(ended.model.named_parameters(), reference.model.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad), name
    assert all(p.grad is not None and not p.grad.any() for p in ended.alignment.projector.parameters())


def test_blocks_are_found_by_name_and_need_a_grid():
    task = make_task(block="unet.output_blocks.3")
    assert losses(task)["alignment"].shape == (N,)
    with refused("alignment_block is unet.nothing, but the network has no such module; names look like"):
        find_block(task.model, "unet.nothing")
    assert find_block(task.model, "") is task.model.unet.encoder.middle
    tokens, size = tokens_of(seeded(2, 6, 5), (40, 60))
    assert size == (2, 3) and tokens.shape == (2, 6, 5)
    assert tokens_of(seeded(2, 5, 4, 3), (40, 60))[1] == (4, 3)
    for output in (seeded(2, 7, 5), seeded(2, 3), (seeded(2, 4, 3),)):
        with refused("no feature map of the image: name another block"):
            tokens_of(output, (32, 32))


def test_a_transformer_is_aligned_by_the_map_of_a_block_without_its_text():
    task = make_task(**TRANSFORMER)
    trunk = task.model.transformer.encoder
    assert find_block(task.model, "") is trunk.maps[1] and len(trunk.maps) == len(trunk.blocks) == 3
    maps, joined = [], []
    trunk.maps[1].register_forward_hook(lambda module, inputs, output: maps.append(output))
    trunk.blocks[1].register_forward_hook(lambda module, inputs, output: joined.append(output))
    assert losses(task)["alignment"].shape == (N,)
    tokens, size = tokens_of(maps[0], (16, 16))
    assert size == (4, 4) and torch.equal(tokens, joined[0][:, :16]) and joined[0].shape[1] > 16
    with refused("output has tokens of the text too: name the block's map, in place of blocks maps"):
        find_block(task.model, "transformer.encoder.blocks.1")


# ---------------------------------------------------------------------------------------------------------- perceptual


@pytest.mark.parametrize("prediction", ["eps", "x_start", "v", "flow"])
def test_the_distance_is_that_of_the_predicted_image_where_noise_is_low(prediction):
    schedule = {"noise_schedule": "flow"} if prediction == "flow" else {"diffusion_steps": 40}
    process = training_process(DiffusionConfig(prediction=prediction, **schedule))
    batch = make_batch()
    draw = Draw(0, batch.index)
    # x_t = a x_start + b noise, by two points of the process.
    t = plain(process).schedule_sampler.sample_at(draw.uniform("timestep"))[0]
    zero, one = torch.zeros_like(batch.images), torch.ones_like(batch.images)
    a, b = process.q_sample(one, t, zero), process.q_sample(zero, t, one)
    snr = (a / b)[:, 0, 0, 0] ** 2
    low = snr >= snr.median()
    task, calls = plain(process, perceptual=0.3, snr=float(snr.median()) * 0.99), []
    task.model.register_forward_hook(lambda module, inputs, output: calls.append((inputs, output)))
    found, alone = losses(task), losses(plain(process))
    noise = draw.normal("noise", batch.images.shape[1:])
    x_t, output = a * batch.images + b * noise, calls[0][1]
    x_start = {
        "eps": (x_t - b * output) / a,
        "x_start": output,
        "v": (x_t * a - b * output),
        "flow": x_t - b * output,
    }[prediction]
    encoder = task.companions[NETWORK]
    distance = (1 - F.cosine_similarity(encoder(batch.images), encoder(x_start), dim=1)).mean((1, 2))
    assert_close(found["perceptual"], torch.where(low, distance, 0.0), atol=1e-4, rtol=1e-3)
    assert_close(found["loss"], alone["loss"] + 0.3 * found["perceptual"])
    assert low.any() and not low.all() and found["perceptual"][low].min() > 1e-3


def test_a_true_image_has_no_distance_and_the_gradient_reaches_all_of_the_network():
    task = plain(perceptual=1.0, snr=0)
    losses(task)["perceptual"].sum().backward()
    assert not [name for name in without_gradient(task.model) if name.startswith("unet")]
    assert all(p.grad is None for p in task.companions[NETWORK].parameters())
    images = make_batch().images
    assert_close(feature_distance(make_encoder())(images, images), torch.zeros(N), atol=1e-6, rtol=0)


@pytest.mark.parametrize("process", [EPS, training_process(DiffusionConfig(noise_schedule="flow"))])
def test_gradients_are_finite_where_there_is_no_signal(process):
    """Although the images that follow from predictions of eps there have no bounds."""
    task, batch = plain(process, perceptual=1.0), make_batch()
    task.perceptual.distance = lambda images, others: others.square().exp().flatten(1).mean(1)
    last = torch.tensor(39) if process is EPS else torch.tensor(1.0, dtype=torch.float64)
    task.schedule_sampler.sample_at = lambda u: (last.expand(len(u)), torch.ones(len(u)))
    found = losses(task, batch)
    assert not found["perceptual"].any()
    found["perceptual"].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in task.model.parameters())
