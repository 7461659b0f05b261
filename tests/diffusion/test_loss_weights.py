"""Weights of the error by log-SNR."""

import math

import pytest
import torch
from network_making import seeded

from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess
from diff_dalle.diffusion.losses import LOSS_WEIGHTS
from diff_dalle.diffusion.parametrization import SCALERS, TARGETS

LOG_SNR = [9.21, 1.0, 0.0, -2.0, -9.21]
SNR = [math.exp(x) for x in LOG_SNR]
VALUES = {
    "none": [1.0] * 5,
    "p2": [1 / (1 + snr) for snr in SNR],
    "snr": SNR,
    "snr_plus_one": [snr + 1 for snr in SNR],
    "min_snr": [5, math.e, 1, math.exp(-2), math.exp(-9.21)],
    "min_snr_plus_one": [5, math.e + 1, 2, math.exp(-2) + 1, math.exp(-9.21) + 1],
    "truncated_snr": [math.exp(9.21), math.e, 1, 1, 1],
    "sech": [2 / (math.exp(x / 2) + math.exp(-x / 2)) for x in LOG_SNR],
    "debiased": [1 / math.sqrt(snr) for snr in SNR],
    "sigmoid": [snr / (1 + snr) for snr in SNR],
}


def weight(*names, **settings):
    process = LogSnrProcess(LogSnrConfig(loss_weighting=names, **settings))
    found = process.loss_weight(torch.tensor(LOG_SNR, dtype=torch.float64))
    assert found.dtype == torch.float32
    return found.tolist()


@pytest.mark.parametrize("name", LOSS_WEIGHTS)
def test_values(name):
    assert weight(name) == pytest.approx(VALUES[name], rel=1e-5)
    assert weight(name, loss_weight_limits=(0.5, 1.5)) == pytest.approx(
        [min(max(value, 0.5), 1.5) for value in VALUES[name]], rel=1e-5
    )


def test_p2_is_the_default():
    found = LogSnrProcess().loss_weight(torch.tensor([9.2102, -9.2102]))
    assert found.tolist() == pytest.approx([1e-4, 0.9999], rel=1e-3)


def test_parameters():
    assert weight("p2", p2_k=2.0, p2_gamma=0.5, p2_s=3.0) == pytest.approx([(2 + snr**3) ** -0.5 for snr in SNR])
    assert weight("min_snr", min_snr_gamma=2.0)[:3] == pytest.approx([2, 2, 1])
    assert weight("min_snr_plus_one", min_snr_gamma=3.0)[:3] == pytest.approx([3, 3, 2])
    assert weight("sigmoid", sigmoid_s=0.5) == pytest.approx([1 / (1 + math.exp(-x / 2)) for x in LOG_SNR])


def test_products_and_quotients():
    for names, expected in (
        (("snr", "p2"), VALUES["sigmoid"]),
        (("min_snr", "/snr"), [min(1, 5 / snr) for snr in SNR]),
        (("/snr_plus_one",), VALUES["p2"]),
        (("sech", "sech", "/p2"), [s * s / p for s, p in zip(VALUES["sech"], VALUES["p2"], strict=True)]),
    ):
        assert weight(*names) == pytest.approx(expected, rel=1e-5)


def test_the_loss_may_be_shifted():
    """loss_shift 3: as if α/σ were three times as large."""
    assert weight("snr", loss_shift=3.0) == pytest.approx([9 * snr for snr in SNR], rel=1e-5)
    x, t = torch.ones(5, 1, 2, 2), torch.rand(5)
    process = LogSnrProcess(LogSnrConfig(loss_shift=3.0))
    losses = process.training_losses(lambda x, t: torch.zeros_like(x), x, t)
    expected = losses["mse"] / (1 + 9 * torch.exp(process.log_snr(t)).float())
    torch.testing.assert_close(losses["loss"], expected)


# -------------------------------------------------------------------------------- what the error is measured of

X, NOISE, OFF = (seeded(6, 2, 1, 1, seed=seed).double() for seed in range(3))
T = torch.tensor([0.06, 0.2, 0.4, 0.6, 0.8, 0.93], dtype=torch.float64)


@pytest.mark.parametrize("space", TARGETS)
@pytest.mark.parametrize("prediction", TARGETS)
@pytest.mark.parametrize("scaler", SCALERS)
def test_the_error_of_another_target(scaler, prediction, space):
    """As if the network's output were converted by way of x_start and noise: a² + b² is not 1 with lerp."""
    if scaler == "vp" and "flow" in (prediction, space):
        return  # x_t and a flow do not determine x_start there
    kind = {"log_snr_schedule": "flow", "scaler": scaler, "prediction": prediction}
    process = LogSnrProcess(LogSnrConfig(**kind, loss_weighting=("none",), loss_space=space))
    wrong = process.target(X, T, NOISE) + OFF
    losses = process.training_losses(lambda x, t: wrong, X, T, noise=NOISE)
    a, b = process.scales(process.log_snr(T), X)
    found = process.undiffuse(process.q_sample(X, T, NOISE), T, wrong)
    error = TARGETS[space].make(*found, a, b) - TARGETS[space].make(X, NOISE, a, b)
    torch.testing.assert_close(losses["loss"], error.square().mean((1, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["mse"], OFF.square().mean((1, 2, 3)))


def test_an_error_near_the_image_is_limited():
    """Li & He 2025: x_start's error over t, which is at least .05; that of eps over α."""
    for prediction, least, divisor in (("x_start", 0.05, T), ("x_start", 0.3, T), ("eps", 0.3, 1 - T)):
        kind = {"log_snr_schedule": "flow", "scaler": "lerp", "prediction": prediction}
        config = LogSnrConfig(**kind, loss_weighting=("none",), loss_space="flow", loss_space_limit=least)
        process = LogSnrProcess(config)
        found = process.loss_weight(process.log_snr(T)).double()
        torch.testing.assert_close(found, divisor.clamp(min=least) ** -2, rtol=1e-5, atol=0)
    assert LogSnrConfig.loss_space_limit == 0.05
