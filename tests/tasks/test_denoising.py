"""The denoising task: loss, reported values, and randomness that depends on the sample alone."""

from dataclasses import replace

import pytest
import torch
from refusing import refused
from torch import nn

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.diffusion.sampling import PreviewConfig, SamplerConfig
from diff_dalle.randomness import Draw
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.tasks.denoising import DenoisingTask

PROCESS = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=40, prediction="x_start"))
FLOW = training_process(DiffusionConfig(noise_schedule="flow", prediction="x_start", loss_space="flow"))
PROCESSES = pytest.mark.parametrize("process", [PROCESS, FLOW], ids=["steps", "flow"])


def draw_of(batch):
    return Draw(0, batch.index)


class Reader(nn.Module):
    """Predicts an image of one gray level per caption: exact when it sees the right caption."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.seen: list[Conditioning] = []

    def forward(self, x, t, cond):
        self.seen.append(cond)
        level = torch.where(cond.mask[:, 1], cond.tokens[:, 1].float() / 10, 0.0)
        return self.gain * level[:, None, None, None].expand_as(x)


def make_batch(n=64):
    level = torch.arange(n) % 5
    tokens = torch.stack([torch.full((n,), 99), level, torch.full((n,), 98)], 1)
    images = (level.float() / 10)[:, None, None, None].expand(n, 3, 4, 4)
    return Batch(images, Conditioning(tokens=tokens, mask=torch.ones(n, 3, dtype=torch.bool)), torch.arange(n))


def make_task(process=PROCESS, **config):
    return DenoisingTask(Reader(), process, DenoisingConfig(**config))


@PROCESSES
def test_right_captions_give_no_loss_and_wrong_ones_the_gap(process):
    """With a model that reads, the loss is 0 and the caption-swap gap is the difference of the two images, as an error
    of what is measured."""
    task, batch = make_task(process), make_batch()
    values = task.held_out(batch, draw_of(batch))
    assert values["loss"].abs().max() == 0
    level, u = batch.cond.tokens[:, 1].float() / 10, draw_of(batch).uniform("timestep")
    divisor = u.clamp(min=0.05).float() if process is FLOW else 1.0
    torch.testing.assert_close(values["caption_swap_gap"], ((level - level.roll(1)) / divisor).square())


def test_gap_is_not_counted_between_equal_captions():
    task, batch = make_task(), make_batch(4)
    same = replace(batch, cond=replace(batch.cond, tokens=batch.cond.tokens[:1].expand(4, 3)))
    assert task.held_out(same, Draw(0, same.index))["caption_swap_gap"].isnan().all()


def test_caption_dropout_hides_the_right_fraction_and_depends_on_position_only():
    task, batch = make_task(caption_dropout=0.3), make_batch(512)
    task.losses(batch, draw_of(batch))
    hidden = ~task.model.seen[-1].mask[:, 1]
    assert 0.2 < hidden.float().mean() < 0.4 and task.model.seen[-1].mask[:, 0].all()
    part = batch.split(100)[3]
    task.losses(part, Draw(0, part.index))
    assert torch.equal(~task.model.seen[-1].mask[:, 1], hidden[300:400])


@PROCESSES
def test_quartiles_split_the_loss_by_timestep(process):
    task, batch = make_task(process, caption_dropout=1.0), make_batch(256)
    values = task.losses(batch, draw_of(batch))
    split = torch.stack([values[f"loss_q{q}"] for q in range(4)])
    assert (~split.isnan()).sum(0).eq(1).all()
    assert torch.allclose(split.nan_to_num().sum(0), values["loss"])
    t = task.schedule_sampler.sample_at(draw_of(batch).uniform("timestep"))[0]
    assert torch.equal((~split.isnan()).float().argmax(0), (4 * t / (1 if process is FLOW else 40)).long())
    assert torch.equal(values["t"], t) and task.recorded == ("t",)


@pytest.mark.parametrize("error", ["mse", "l1", "huber"])
def test_the_error_is_reported_under_its_name(error):
    process = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=40, loss_type=error))
    task, batch = DenoisingTask(Reader(), process, DenoisingConfig()), make_batch(8)
    values = task.losses(batch, draw_of(batch))
    assert torch.equal(values[error], values["loss"])


def test_dropout_keys_are_handed_to_the_network():
    task, batch = make_task(), make_batch(8)
    task.losses(batch, draw_of(batch))
    first = task.model.seen[-1].dropout_keys
    task.losses(batch, Draw(1, batch.index))
    assert len(set(first.tolist())) == 8 and not torch.equal(first, task.model.seen[-1].dropout_keys)


def test_routing_keys_are_handed_to_the_network_in_training_until_an_update():
    """One a sample, of its position alone; not in evaluation."""
    task, batch = make_task(), make_batch(8)

    def seen(draw):
        task.losses(batch, draw)
        return task.model.seen[-1].routing_keys

    assert seen(draw_of(batch)) is None
    task.routes = True
    keys = seen(draw_of(batch))
    assert len(set(keys.tolist())) == 8 and not torch.equal(keys, seen(Draw(1, batch.index)))
    assert torch.equal(keys, seen(draw_of(batch))) and not torch.equal(keys, task.model.seen[-1].dropout_keys)
    task.routed_until = 16
    assert seen(Draw(0, batch.index + 8)) is not None and seen(Draw(0, batch.index + 16)) is None
    task.held_out(batch, draw_of(batch))
    assert all(cond.routing_keys is None for cond in task.model.seen[-2:])


def test_loss_aware_timesteps_observe_and_survive_a_checkpoint():
    task, batch = make_task(schedule_sampler="loss-second-moment", caption_dropout=0.5), make_batch(64)
    for step in range(40):
        index = batch.index + 64 * step
        values = task.losses(replace(batch, index=index), Draw(0, index))
        task.observe({name: values[name] for name in task.observed})
    again = make_task(schedule_sampler="loss-second-moment", caption_dropout=0.5)
    u = Draw(3, batch.index).uniform("timestep")
    before = again.schedule_sampler.sample_at(u)[0]
    again.load_extra_state(task.extra_state())
    expected = task.schedule_sampler.sample_at(u)
    assert torch.equal(again.schedule_sampler.sample_at(u)[0], expected[0])
    assert not torch.equal(before, expected[0]) or not torch.allclose(expected[1], torch.ones(64))


def test_times_that_follow_the_losses_need_steps():
    flow = DiffusionConfig(noise_schedule="flow")
    with refused("schedule_sampler is 'loss-second-moment', but noise_schedule flow has no steps"):
        GeneratorRun(diffusion=flow, denoising=DenoisingConfig("loss-second-moment"))
    run = GeneratorRun(diffusion=flow, denoising=DenoisingConfig("logit_normal", logit_mean=2.0))
    task, batch = DenoisingTask(Reader(), training_process(flow), run.denoising), make_batch(512)
    drawn, held_out = (values(batch, draw_of(batch)) for values in (task.losses, task.held_out))
    assert drawn["t"].median().item() == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.02)
    assert (~held_out["loss_q0"].isnan()).float().mean().item() == pytest.approx(0.25, abs=0.06)  # uniform, as ever


def test_losses_have_the_weight_of_their_timestep():
    """Importance sampling is unbiased only with it."""
    task, batch = make_task(schedule_sampler="loss-second-moment", caption_dropout=0.0), make_batch(64)
    t = torch.arange(40).repeat(10)
    task.observe({"t": t, "unweighted_loss": 1.0 + t})
    task.model.gain.data.fill_(0.5)
    values = task.losses(batch, draw_of(batch))
    drawn, weights = task.schedule_sampler.sample_at(draw_of(batch).uniform("timestep"))
    assert weights.max() > 2 * weights.min() and values["unweighted_loss"].max() > 0
    assert torch.equal(values["t"], drawn)
    torch.testing.assert_close(values["loss"], values["unweighted_loss"] * weights)


def test_impossible_dropout_is_refused():
    with refused("caption_dropout is 1.5"):
        DenoisingConfig(caption_dropout=1.5)


def test_previews_with_more_steps_than_the_process_has_are_refused_at_the_start():
    few, steps = DiffusionConfig(diffusion_steps=20), PreviewConfig(sampler=SamplerConfig(steps=21))
    with refused("steps is 21"):
        GeneratorRun(diffusion=few, preview=steps)
    GeneratorRun(diffusion=few, preview=replace(steps, sample_interval=0))
    assert GeneratorRun(diffusion=few).preview.sampler.process(few).num_timesteps == 20  # not given, so all there are
