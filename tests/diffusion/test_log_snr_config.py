"""Settings of a process in log-SNR."""

from dataclasses import dataclass, fields

import pytest
import torch
from refusing import refused

from diff_dalle.commands.command_line import parse
from diff_dalle.config import section
from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess


@dataclass(frozen=True)
class Run:
    process: LogSnrConfig = section(LogSnrConfig)


CHANGES = {  # each setting with what it needs, in flags, and how it shows
    "log_snr_schedule": ("--log_snr_schedule linear", "log_snr"),
    "log_snr_interpolation": ("--log_snr_interpolation linear", "log_snr"),
    "log_snr_steps": ("--log_snr_steps 3", "log_snr"),
    "squeeze_log_snr": ("--squeeze_log_snr True", "log_snr"),
    "shift": ("--shift 2", "log_snr"),
    "sampling_schedule": ("--sampling_schedule edm", "levels"),
    "scaler": ("--scaler lerp", "seen"),
    "prediction": ("--prediction v", "mse"),
    "noise_condition": ("--noise_condition edm", "told"),
    "noise_condition_steps": ("--noise_condition_steps 5", "told"),
    "sigma_data": ("--noise_condition sigma --sigma_data 3", "told"),
    "loss_weighting": ("--loss_weighting snr,/p2", "weight"),
    "p2_k": ("--p2_k 2", "weight"),
    "p2_gamma": ("--p2_gamma 2", "weight"),
    "p2_s": ("--loss_weighting /p2 --p2_s 2", "weight"),
    "min_snr_gamma": ("--loss_weighting min_snr --min_snr_gamma 2", "weight"),
    "sigmoid_s": ("--loss_weighting sigmoid --sigmoid_s 2", "weight"),
    "loss_shift": ("--loss_shift 2", "weight"),
    "loss_weight_limits": ("--loss_weight_limits 0.3,0.4", "weight"),
    "loss_space": ("--loss_space v", "weight"),
    "loss_space_limit": ("--scaler lerp --loss_space flow --loss_space_limit 0.2", "weight"),
    "offset_noise": ("--offset_noise 0.5", "seen"),
    "pyramid_noise": ("--pyramid_noise 0.75", "seen"),
}


def effects(process):
    """What a network and an optimizer see of a process."""
    generator = torch.Generator().manual_seed(0)
    t, x = torch.tensor([0.01, 0.3, 0.6, 0.97]), torch.randn(4, 2, 4, 4, generator=generator)
    noise = process.noise(lambda name, shape: torch.randn(4, *shape, generator=generator), (2, 4, 4))
    seen = []
    losses = process.training_losses(lambda x, t: seen.extend([x, t]) or 0.1 * x, x, t, noise=noise)
    return {
        "log_snr": process.log_snr(t),
        "levels": torch.from_numpy(process.steps(3).alphas_cumprod),
        "seen": seen[0],
        "told": seen[1],
        "mse": losses["mse"],
        "weight": losses["loss"] / losses["mse"],
    }


def test_every_setting_has_a_flag_and_an_effect():
    assert set(CHANGES) == {field.name for field in fields(LogSnrConfig)}
    for name, (flags, shows) in CHANGES.items():
        changed = parse(Run, flags.split()).process
        before = parse(Run, flags[: flags.index(f"--{name}")].split()).process
        assert changed != before and getattr(changed, name) != getattr(before, name)
        one, other = effects(LogSnrProcess(changed))[shows], effects(LogSnrProcess(before))[shows]
        assert (one - other).abs().max() > 1e-4, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_snr_schedule": "cosin"}, "log_snr_schedule is 'cosin', but must be one of .*; did you mean cosine"),
        ({"log_snr_interpolation": "adaptive"}, "log_snr_interpolation is 'adaptive'"),
        ({"sampling_schedule": "adaptive"}, "sampling_schedule is 'adaptive'"),
        ({"scaler": "pv"}, "scaler is 'pv', but must be one of vp, lerp"),
        ({"prediction": "previous_x"}, "prediction is 'previous_x'"),
        ({"noise_condition": "t"}, "noise_condition is 't'"),
        ({"loss_weighting": ("p2", "/min_snt")}, "loss_weighting is '/min_snt', but .*; did you mean /min_snr"),
        ({"prediction": "flow"}, "prediction is 'flow', but scaler is vp.*set scaler to lerp"),
        ({"log_snr_schedule": "adaptive", "log_snr_steps": 5}, "log_snr_schedule is adaptive.* leave out"),
        ({"log_snr_schedule": "adaptive", "log_snr_interpolation": "edm"}, "log_snr_schedule is adaptive"),
        ({"squeeze_log_snr": True, "log_snr_schedule": "edm"}, "squeeze_log_snr is True, but only cosine and sqrt"),
        ({"shift": 0.0}, "shift is 0, but must be above 0"),
        ({"loss_shift": -1.0}, "loss_shift is -1, but must be above 0"),
        ({"sigma_data": 0.0}, "sigma_data is 0"),
        ({"p2_k": 0.0}, "p2_k is 0"),
        ({"min_snr_gamma": 0.0}, "min_snr_gamma is 0"),
        ({"p2_gamma": -1.0}, "p2_gamma is -1, but must be at least 0"),
        ({"log_snr_steps": -1}, "log_snr_steps is -1"),
        ({"offset_noise": -0.1}, "offset_noise is -0.1"),
        ({"pyramid_noise": -0.1}, "pyramid_noise is -0.1"),
        ({"noise_condition_steps": 1}, "noise_condition_steps is 1, but must be at least 2 and at most 100,000, or 0"),
        ({"loss_weight_limits": (1.0,)}, "loss_weight_limits is .* LOW,HIGH"),
        ({"loss_weight_limits": (2.0, 1.0)}, "loss_weight_limits is"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with refused(message):
        LogSnrConfig(**settings)
    LogSnrConfig(prediction="flow", scaler="lerp")
    LogSnrConfig(squeeze_log_snr=True, log_snr_schedule="edm_train", sampling_schedule="cosine")


def test_a_parameter_of_another_weight_is_refused_as_a_flag():
    with refused("--min_snr_gamma has no effect while loss_weighting is p2"):
        parse(Run, ["--min_snr_gamma", "3"])
