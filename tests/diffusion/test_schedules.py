"""Beta tables."""

import numpy as np
import pytest

from diff_dalle.config import InputError
from diff_dalle.diffusion import SCHEDULES, betas_for_alpha_bar, get_named_beta_schedule

COUNTS = [*range(1, 45), 100, 250, 1000, 1001, 2000, 4000]


@pytest.mark.parametrize("name", SCHEDULES)
def test_valid_or_refused(name):
    """For every number of steps, betas are float64 in (0, 1], or the error says what to change."""
    refused = []
    for steps in COUNTS:
        try:
            betas = get_named_beta_schedule(name, steps)
        except InputError as error:
            assert "diffusion_steps" in str(error)
            refused.append(steps)
        else:
            assert betas.shape == (steps,) and betas.dtype == np.float64
            assert ((betas > 0) & (betas <= 1)).all()
    assert refused == ([] if name in ("cosine", "jsd") else list(range(2, 20)))


def test_formulas():
    """Values stated in the papers."""
    assert get_named_beta_schedule("linear", 1000)[[0, -1]] == pytest.approx([1e-4, 0.02])
    assert get_named_beta_schedule("quadratic", 1000)[[0, -1]] == pytest.approx([1e-4, 0.02])
    assert np.sqrt(get_named_beta_schedule("quadratic", 3001)[1500]) == pytest.approx(
        (np.sqrt(1e-4) + np.sqrt(0.02)) / 2 * np.sqrt(1000 / 3001)
    )
    sigmoid = get_named_beta_schedule("sigmoid", 1001)
    assert sigmoid[500] == pytest.approx((1e-4 + 0.02) / 2 * 1000 / 1001)
    assert sigmoid[0] == pytest.approx((1e-4 + 0.0199 / (1 + np.exp(6))) * 1000 / 1001)
    assert np.cumprod(1 - get_named_beta_schedule("jsd", 50)) == pytest.approx(1 - np.arange(1, 51) / 50)
    assert get_named_beta_schedule("cosine", 1000)[-1] == 0.999
    betas = betas_for_alpha_bar(100, lambda t: 1 - t, max_beta=0.5)
    assert np.cumprod(1 - betas)[:98] == pytest.approx(1 - np.arange(1, 99) / 100) and betas[-1] == 0.5


@pytest.mark.parametrize(
    ("name", "steps", "message"), [("cosin", 10, "did you mean cosine"), ("cosine", 0, "must be from 1 to")]
)
def test_bad_input(name, steps, message):
    """The error for a misspelled schedule suggests the nearest; zero steps are refused."""
    with pytest.raises(InputError, match=message):
        get_named_beta_schedule(name, steps)
