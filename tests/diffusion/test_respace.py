"""Respacing: the steps kept, and the process built from them."""

import numpy as np
import pytest
import torch
from refusing import refused

from diff_dalle.diffusion import (
    GaussianDiffusion,
    LossType,
    ModelMeanType,
    ModelVarType,
    SpacedDiffusion,
    get_named_beta_schedule,
    space_timesteps,
)

KINDS = {
    "model_mean_type": ModelMeanType.EPSILON,
    "model_var_type": ModelVarType.FIXED_LARGE,
    "loss_type": LossType.MSE,
}


def test_space_timesteps():
    """Even spacing includes both ends, sections get their counts, ddim strides start at 0; a list equals a string."""
    assert space_timesteps(10, "4") == {0, 3, 6, 9}
    assert space_timesteps(1000, "1") == {0}
    assert space_timesteps(1000, "ddim25") == set(range(0, 1000, 40))
    sections = space_timesteps(300, "10,15,20")
    assert [len([step for step in sections if i <= step < i + 100]) for i in (0, 100, 200)] == [10, 15, 20]
    assert {0, 99, 100, 199, 200, 299} <= sections
    assert space_timesteps(300, [10, 15, 20]) == sections
    # the first section gets the odd step; halves round to even
    assert space_timesteps(11, "3,3") == {0, 2, 5, 6, 8, 10}
    assert space_timesteps(7, "7") == set(range(7))


@pytest.mark.parametrize(
    "text", ["", "abc", "10,", "-5", "2.5", "0", "0,0", "11", "6,5", "ddim", "ddim7", "ddim5,5", "ddim0"]
)
def test_impossible_strings(text):
    """Impossible selections from 10 steps are refused, naming the flag."""
    with refused("timestep_respacing"):
        space_timesteps(10, text)


def test_levels_and_timesteps_of_the_original():
    """Kept steps have the original noise levels, and the model's time input is the original step number."""
    betas = get_named_beta_schedule("cosine", 100)
    original = GaussianDiffusion(betas=betas, **KINDS)
    for rescale, factor in ((False, 1), (True, 10.0)):
        spaced = SpacedDiffusion(space_timesteps(100, "7"), betas=betas, rescale_timesteps=rescale, **KINDS)
        assert (spaced.num_timesteps, spaced.original_num_steps) == (7, 100)
        np.testing.assert_allclose(spaced.alphas_cumprod, original.alphas_cumprod[spaced.timestep_map], rtol=1e-9)
        seen = []

        def model(x, t, seen=seen):
            seen.append(t)
            return x

        x, t = torch.zeros(3, 1, 2, 2), torch.tensor([0, 3, 6])
        spaced.training_losses(model, x, t)
        spaced.denoiser(model)(x, 3)
        spaced.condition_mean(model, spaced.p_mean_variance(model, x, t), x, t)
        expected = torch.tensor(spaced.timestep_map)[t] * factor
        middle = torch.full((3,), spaced.timestep_map[3]) * factor
        for got, reference in zip(seen, [expected, middle, expected, expected], strict=True):
            assert torch.equal(got, reference)


@pytest.mark.parametrize("steps", [set(), {0, 10}, {-1, 3}])
def test_steps_outside_the_process(steps):
    """Steps outside the process are refused."""
    with refused("0 to 9"):
        SpacedDiffusion(steps, betas=get_named_beta_schedule("cosine", 10), **KINDS)
