"""Weights of the error by log-SNR."""

import math

import pytest
import torch

from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess
from diff_dalle.diffusion.loss_weights import LOSS_WEIGHTS

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
