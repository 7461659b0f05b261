"""Timestep samplers."""

import numpy as np
import pytest
import torch
from refusing import refused

from diff_dalle.diffusion import (
    DiffusionConfig,
    LogSnrProcess,
    LossSecondMomentResampler,
    UniformSampler,
    create_gaussian_diffusion,
    create_named_schedule_sampler,
)
from diff_dalle.diffusion.resample import SCHEDULE_SAMPLERS, TimestepConfig

STEPS, HISTORY = 7, 4


def process(steps=STEPS):
    return create_gaussian_diffusion(DiffusionConfig(steps, "cosine"))


def warm(seed=0):
    sampler = LossSecondMomentResampler(process(), history_per_term=HISTORY)
    losses = torch.rand(STEPS * HISTORY, generator=torch.Generator().manual_seed(seed)) ** 3
    sampler.update(torch.arange(STEPS).repeat(HISTORY), losses)
    return sampler


def test_update_is_the_sequential_one():
    """Batches with repeated steps, even more than the history holds, are equivalent to one-by-one updates."""
    sampler = LossSecondMomentResampler(process(), history_per_term=HISTORY)
    history, counts = np.zeros((STEPS, HISTORY)), np.zeros(STEPS, dtype=int)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 5, 40, 3, 20, 9):
        ts = torch.randint(STEPS, (size,), generator=generator)
        losses = torch.rand(size, generator=generator)
        sampler.update(ts, losses)
        for t, loss in zip(ts.tolist(), losses.tolist(), strict=True):
            if counts[t] == HISTORY:
                history[t] = [*history[t, 1:], loss]
            else:
                history[t, counts[t]] = loss
                counts[t] += 1
        state = sampler.state_dict()
        np.testing.assert_allclose(state["loss_history"], history, rtol=1e-6)
        assert state["loss_counts"].tolist() == counts.tolist()


@pytest.mark.parametrize("make", [lambda: UniformSampler(process()), warm], ids=["uniform", "loss-second-moment"])
def test_unbiased(make):
    """Over evenly spaced u, the mean of weight × f(t) is the mean of f over all steps."""
    sampler, f = make(), torch.arange(STEPS, dtype=torch.float64) ** 2
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    t, weights = sampler.sample_at(u)
    assert t.dtype == torch.int64 and weights.dtype == torch.float32
    assert (weights * f[t]).mean().item() == pytest.approx(f.mean().item(), rel=1e-3)


def test_probabilities_follow_the_losses():
    """With a full history, probabilities are proportional to the RMS of the losses; before that, uniform."""
    sampler = warm()
    rms = sampler.state_dict()["loss_history"].double().square().mean(1).sqrt()
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    share = sampler.sample_at(u)[0].bincount(minlength=STEPS) / len(u)
    expected = 0.999 * rms / rms.sum() + 0.001 / STEPS
    torch.testing.assert_close(share.double(), expected, atol=1e-4, rtol=0)
    cold = LossSecondMomentResampler(process(), history_per_term=HISTORY)
    cold.update(torch.arange(STEPS - 1).repeat(HISTORY), torch.rand((STEPS - 1) * HISTORY))
    t, weights = cold.sample_at(u)
    assert (weights == 1).all() and torch.equal(t, UniformSampler(process()).sample_at(u)[0])


def test_a_seed_gives_guided_diffusions_timesteps():
    """``sample`` equals numpy's choice with the same distribution and seed."""
    sampler = warm()
    rms = sampler.state_dict()["loss_history"].double().square().mean(1).sqrt().numpy()
    p = rms / rms.sum() * 0.999 + 0.001 / STEPS
    np.random.seed(3)
    expected = np.random.choice(STEPS, size=50, p=p)
    np.random.seed(3)
    t, weights = sampler.sample(50, "cpu")
    assert t.tolist() == expected.tolist()
    np.testing.assert_allclose(weights, 1 / (STEPS * p[expected]), rtol=1e-5)


def test_non_finite_losses_are_discarded():
    """A NaN or infinite loss changes nothing, and later losses are recorded as usual."""
    sampler, clean = warm(), warm()
    sampler.update(torch.tensor([1, 2, 1, 3]), torch.tensor([torch.nan, torch.inf, 0.5, 0.25]))
    clean.update(torch.tensor([1, 3]), torch.tensor([0.5, 0.25]))
    for name, value in clean.state_dict().items():
        assert torch.equal(sampler.state_dict()[name], value)


def test_state_round_trip():
    """A new sampler with the saved state samples the same; another process's state is refused."""
    u = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fresh = LossSecondMomentResampler(process(), history_per_term=HISTORY)
    fresh.load_state_dict(warm().state_dict())
    assert torch.equal(fresh.sample_at(u)[0], warm().sample_at(u)[0])
    with refused("diffusion_steps"):
        LossSecondMomentResampler(process(9), history_per_term=HISTORY).load_state_dict(warm().state_dict())


def test_edges_and_names():
    """The ends of [0, 1) map to the first and last step, in float32 too; every named sampler can be created."""
    for name in SCHEDULE_SAMPLERS:
        ends = [8, 991] if name == "logit_normal" else [0, 999]  # beyond, its probability is 1e-6
        sampler = create_named_schedule_sampler(name, process(1000))
        for dtype in (torch.float32, torch.float64):
            u = torch.tensor(
                [0.0, torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype))], dtype=dtype
            )
            assert sampler.sample_at(u)[0].tolist() == ends
    with refused("did you mean uniform"):
        create_named_schedule_sampler("unifrom", process())


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.8), (-1.0, 0.5)])
def test_logit_normal_times(mean, std):
    """log(t / (1 − t)) ~ N(mean, std²), t = 1 being noise, in continuous time and in steps; in order of u."""
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    config = TimestepConfig("logit_normal", mean, std)
    t, weights = config.sampler(LogSnrProcess()).sample_at(u)
    logits = torch.logit(t)
    assert (logits.mean().item(), logits.std().item()) == pytest.approx((mean, std), abs=2e-3)
    assert (t.diff() >= 0).all() and (weights == 1).all() and weights.dtype == torch.float32
    steps = config.sampler(process(1000)).sample_at(u)[0]
    assert torch.equal(steps, (t * 1000).long())
    assert not config.sampler(LogSnrProcess()).observes and LossSecondMomentResampler.observes


def test_times_of_a_flow_cover_it():
    u = torch.tensor([0.0, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert torch.equal(TimestepConfig().sampler(LogSnrProcess()).sample_at(u)[0], u)
