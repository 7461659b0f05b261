"""Training a ControlNet: whose gradients, which controls, what is measured."""

from dataclasses import replace

import pytest
import torch
from network_making import captions, make_generator, pixels

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.images.control_filters.table import ControlConfig
from diff_dalle.models.adapters.controlnet import Controlled, UnetControlConfig, UnetControlNet
from diff_dalle.randomness import Draw
from diff_dalle.tasks.control import BASE, SEED, ControlledDenoisingTask, control_of
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.trainee import Trainee

PROCESS = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=40, prediction="x_start"))
FLOW = training_process(DiffusionConfig(noise_schedule="flow", prediction="x_start", loss_space="flow"))
BOTH = pytest.mark.parametrize("process", [PROCESS, FLOW], ids=["steps", "flow"])
N = 4


def draw_of(batch):
    return Draw(0, batch.index)


def make_batch() -> Batch:
    images = pixels(N, 3, 16, 16)
    return Batch(images, captions((3, 5, 2, 4)), torch.arange(10, 10 + N))


def make_task(name="inpaint", process=PROCESS, **base) -> ControlledDenoisingTask:
    network, control_filter = make_generator(dropout=0.2, **base), ControlConfig(name).create()
    torch.manual_seed(0)
    controlnet = UnetControlNet(UnetControlConfig(8), network.config, control_filter.channels)
    controlnet.start_from(network)
    task = ControlledDenoisingTask(controlnet, process, DenoisingConfig())
    task.add_companion(BASE, network)
    task.control_filter = control_filter
    return task


@BOTH
def test_the_first_loss_is_that_of_the_base(process):
    """Of the base in evaluation mode: without its dropout, although the task trains."""
    task, batch = make_task(process=process).train(), make_batch()
    base = task.companions[BASE]
    assert not any(module.training for module in base.modules()) and task.model.training
    alone = DenoisingTask(base, process, DenoisingConfig()).eval()
    expected, found = (each.losses(batch, draw_of(batch))["loss"] for each in (alone, task))
    assert torch.equal(expected, found)


def test_all_of_a_new_controlnet_and_nothing_else_is_trained():
    """What starts at 0 included."""
    task, batch = make_task(), make_batch()
    trainee = Trainee(task, OptimConfig(ema_rate=(0.5,), lr=1e-2), "fp32", ALONE)
    own = {name: value.clone() for name, value in task.model.state_dict().items()}
    for step in range(3):
        trainee.update([(batch, draw_of(batch))], step)
    assert [name for name, value in task.model.state_dict().items() if torch.equal(own[name], value)] == []
    optimizer = trainee.optimizations[""].optimizer
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in task.model.parameters()} and len(optimizer.state) == len(held)
    assert trainee.states()["ema_0.5"].keys() == own.keys() == trainee.states()["model"].keys()


def test_controls_are_of_the_positions():
    """In training by the run's draw, in evaluation always the same; ready-made ones are taken as they are."""
    task, batch = make_task(), make_batch()
    trained = task.condition(batch, draw_of(batch)).control
    expected = task.control_filter((batch.images + 1) / 2, draw_of(batch))
    assert torch.equal(trained, expected)
    assert not torch.equal(task.condition(batch, Draw(1, batch.index)).control, trained)
    fixed = control_of(task.control_filter, batch)
    assert torch.equal(fixed, task.control_filter((batch.images + 1) / 2, Draw(SEED, batch.index)))
    ready = torch.rand(N, 4, 16, 16)
    given = replace(batch, cond=replace(batch.cond, control=ready))
    assert task.condition(given, draw_of(batch)).control is ready


def test_gray_pictures_have_controls_too():
    task = make_task("canny", image_channels=1)
    batch = replace(make_batch(), images=make_batch().images[:, :1])
    assert task.condition(batch, draw_of(batch)).control.shape == (N, 1, 16, 16)
    task.losses(batch, draw_of(batch))["loss"].sum().backward()


def test_caption_dropout_leaves_the_control():
    task, batch = make_task(), make_batch()
    task.config = replace(task.config, caption_dropout=1.0)
    seen = []
    task.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    task.losses(batch, draw_of(batch))
    hint, _, _, cond = seen[0]
    assert cond.mask.sum(1).tolist() == [1] * N
    assert torch.equal(hint, task.model.encode(task.condition(batch, draw_of(batch)).control))


@BOTH
def test_the_use_of_the_control_is_measured(process):
    """The gap is 0 before training, and NaN where another sample's control is the same."""
    task, batch = make_task("picture", process), make_batch()
    same = replace(batch, images=batch.images[:1].expand(N, -1, -1, -1))
    named = task.held_out(batch, draw_of(batch))
    assert (named["control_swap_gap"] == 0).all() and "caption_swap_gap_q3" in named
    assert task.held_out(same, draw_of(batch))["control_swap_gap"].isnan().all()
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    assert (task.held_out(batch, draw_of(batch))["control_swap_gap"] != 0).all()


def test_previews_are_of_the_steered_base():
    task = make_task()
    task.preview = lambda network: {"seen": network}
    found = task.previews()["seen"]
    assert isinstance(found, Controlled) and found.base is task.companions[BASE] and found.controlnet is task.model


def test_conditions_keep_a_control():
    cond = Conditioning(control=torch.rand(N, 2, 4, 4), labels=torch.arange(N))
    assert torch.equal(cond.drop(torch.ones(N, dtype=torch.bool), 9).control, cond.control)
    assert torch.equal(Conditioning.concat(cond.split(3)).control, cond.control)
