"""The numbers of openai/guided-diffusion, recorded from its own code with this file's ``record``."""

from pathlib import Path

import numpy as np
import pytest
import torch

from diff_dalle.diffusion import (
    GaussianDiffusion,
    LossType,
    ModelMeanType,
    ModelVarType,
    SpacedDiffusion,
    get_named_beta_schedule,
    space_timesteps,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "guided_diffusion.npz"
SHAPE = (3, 1, 2, 3)
MEANS = ("PREVIOUS_X", "START_X", "EPSILON")
VARIANCES = ("LEARNED", "LEARNED_RANGE", "FIXED_SMALL", "FIXED_LARGE")
LOSSES = ("MSE", "RESCALED_MSE", "KL", "RESCALED_KL")
RESPACINGS = ("", "7", "ddim10", "2,3,4")
# Every pair of (mean, variance) with every loss; schedule, respacing and rescaling change along the way.
CONFIGS = [
    (("linear", "cosine")[(i + j + k) % 2], mean, variance, loss, RESPACINGS[(i + j + 2 * k) % 4], bool((j + k) % 3))
    for i, mean in enumerate(MEANS)
    for j, variance in enumerate(VARIANCES)
    for k, loss in enumerate(LOSSES)
]


def make_model(channels):
    """A network without weights, whose output depends smoothly on all inputs."""

    def model(x, t, y=0.0):
        time = t.float().view(-1, 1, 1, 1) / 1000
        mean = torch.tanh(0.7 * x + torch.sin(3 * time)) + 0.1 * x.roll(1, -1) + 0.05 * y
        return mean if channels == 1 else torch.cat([mean, 1.2 * torch.sin(x + time)], dim=1)

    return model


def cond_fn(x, t, y=0.0):
    return 0.3 * torch.sin(2 * x + t.float().view(-1, 1, 1, 1) / 700) + y


def record(process, learned):
    """name → numbers, by calls that are the same in Guided-Diffusion."""
    pixels = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    x_start = torch.tensor(pixels * 7 % 256 / 127.5 - 1, dtype=torch.float32)
    x_t = torch.tensor(np.sin(pixels * 1.7), dtype=torch.float32)
    last = process.num_timesteps - 1
    model, t, y = make_model(2 if learned else 1), torch.tensor([0, last // 2, last]), {"y": 0.5}
    loop = {"model_kwargs": y, "device": "cpu"}
    torch.manual_seed(0)
    results = {
        "table": {name: getattr(process, name) for name in ("posterior_variance", "posterior_mean_coef2")},
        "training_losses": process.training_losses(model, x_start, t, y),
        "p_mean_variance": process.p_mean_variance(model, x_t, t, True, lambda x: 0.9 * x, y),
        "p_sample": process.p_sample(model, x_t, t, False, None, cond_fn, y),
        "ddim_sample": process.ddim_sample(model, x_t, t, True, None, cond_fn, y, 0.5),
        "ddim_reverse_sample": process.ddim_reverse_sample(model, x_t, t, model_kwargs=y),
        "p_sample_loop": {"": process.p_sample_loop(model, SHAPE, cond_fn=cond_fn, **loop)},
        "ddim_sample_loop": {"": process.ddim_sample_loop(model, SHAPE, **loop)},
        "calc_bpd_loop": process.calc_bpd_loop(model, x_start, model_kwargs=y),
        "random": {"": torch.rand(2)},
    }
    return {f"{call} {key}": np.asarray(value) for call, values in results.items() for key, value in values.items()}


def packed(results):
    """All numbers in one float32 array, in the order of their names, long tables thinned."""
    return np.concatenate([results[name].ravel()[:: 1 + results[name].size // 64] for name in sorted(results)])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config)))
def test_equal_to_guided_diffusion(config):
    """Tables, losses, predictions, samples, loops, likelihoods and random draws, to 1e-5."""
    schedule, mean, variance, loss, respacing, rescale = config
    kwargs = {
        "betas": get_named_beta_schedule(schedule, 24 if not respacing else 1000),
        "model_mean_type": ModelMeanType[mean],
        "model_var_type": ModelVarType[variance],
        "loss_type": LossType[loss],
        "rescale_timesteps": rescale,
    }
    steps = respacing and space_timesteps(1000, respacing)
    process = SpacedDiffusion(steps, **kwargs) if steps else GaussianDiffusion(**kwargs)
    found = packed(record(process, ModelVarType[variance].is_learned))
    with np.load(GOLDEN) as golden:
        expected = golden["-".join(map(str, config))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_schedules_and_spacings():
    """Beta tables and kept steps are equal in every digit."""
    with np.load(GOLDEN) as golden:
        for name in ("linear", "cosine"):
            for steps in (20, 100, 1000):
                assert np.array_equal(get_named_beta_schedule(name, steps), golden[f"betas {name} {steps}"])
        for text in ("250", "10,15,20", "ddim25", "7,9,1,2"):
            assert sorted(space_timesteps(1000, text)) == golden[f"steps {text}"].tolist()
