"""What a network is told of the noise level."""

import math

import pytest
import torch

from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess
from diff_dalle.diffusion.log_snr_schedules import NOISE_CONDITIONS

LOG_SNR = [9.2102, 1.7114, 0.0, -1.7803, -9.2102]
VALUES = {
    "cosine": [0.0023, 0.25, 0.4960, 0.75, 0.9936],
    "stable_diffusion": [0, 0.1363, 0.3542, 0.6183, 1],
    "flow_steps": [1000 / (1 + math.exp(x / 2)) for x in LOG_SNR],
    "rectified_flow": [1 / (1 + math.exp(-x / 2)) for x in LOG_SNR],
    "sigmoid": [1e-4, 0.1530, 0.5, 0.8557, 0.9999],
    "edm": [-x / 8 for x in LOG_SNR],
    "log_snr": LOG_SNR,
    "sigma": [math.exp(-x / 2) for x in LOG_SNR],
}


def condition(**settings):
    return LogSnrProcess(LogSnrConfig(**settings)).condition(torch.tensor(LOG_SNR, dtype=torch.float64))


@pytest.mark.parametrize("name", NOISE_CONDITIONS)
def test_values(name):
    found = condition(noise_condition=name)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(VALUES[name], abs=1e-4)


def test_units_of_the_data():
    assert condition(noise_condition="sigma", sigma_data=0.5).tolist() == pytest.approx(
        [0.5 * value for value in VALUES["sigma"]], rel=1e-4
    )


def test_a_shifted_schedule_looks_like_a_later_time():
    """The network is told the noise there is, not the time."""
    for process in (LogSnrProcess(LogSnrConfig(shift=2.0)), LogSnrProcess()):
        steps = process.steps(4, shift=2.0 / process.config.shift)
        assert steps.time_inputs.tolist() == pytest.approx([0.4441, 0.7056, 0.8701, 0.9936], abs=1e-4)
        seen = []
        for t in range(4):
            seen.append(steps.model_steps(torch.zeros(2, 1, 1, 1), t))
        assert torch.equal(torch.stack(seen)[:, 0], torch.from_numpy(steps.time_inputs))


@pytest.mark.parametrize("name", NOISE_CONDITIONS)
def test_levels(name):
    """Integers from 0 at the clean end of the schedule to n − 1 at the noisy one."""
    process = LogSnrProcess(LogSnrConfig(noise_condition=name, noise_condition_steps=10))
    t = torch.linspace(0, 1, 2001)
    levels = process.condition(process.log_snr(t))
    assert levels[0] == 0 and levels[-1] == 9 and (levels.diff() >= 0).all() and (levels == levels.floor()).all()
    plain = LogSnrProcess(LogSnrConfig(noise_condition=name))
    share = plain.condition(plain.log_snr(t))
    share = (share - share[0]) / (share[-1] - share[0])
    torch.testing.assert_close(levels, (share * 10).floor().clamp(max=9), atol=1, rtol=0)
    assert (levels != (share * 10).floor().clamp(max=9)).sum() < 10  # but for rounding
