"""The bare loop gives what sampling gives, and the gates notice when it does not."""

from dataclasses import replace

import pytest

from benchmarks import sampling
from benchmarks.registry import BENCHMARKS
from benchmarks.timing import Table, TimingConfig, check, results
from diff_dalle.config import InputError
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig

NAMES = ("sampling", "sampling_guided", "sampling_steps")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    unet = DenoiserConfig(
        image_size=16, num_channels=16, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(8,)
    )
    monkeypatch.setattr(sampling, "UNET", unet)
    monkeypatch.setattr(sampling, "TEXT", TextEncoderConfig(enc_attn_dim=16, enc_depth=1, enc_heads=2, text_length=12))


def directly(function):
    return function()


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_agree(name):
    check(BENCHMARKS[name], directly)


@pytest.mark.parametrize("name", NAMES)
def test_another_result_does_not_pass(name, monkeypatch):
    """Sampling with another guidance scale than the bare loop's."""
    monkeypatch.setattr(sampling, "GuidanceConfig", lambda scale=1.0, guidance_scale=None: GuidanceConfig(1.5))
    with pytest.raises(InputError, match="different results"):
        check(BENCHMARKS[name], directly)


def test_the_images_are_not_all_alike():
    images = sampling.sampled(guided=True)()
    assert images.shape == (4, 16, 16, 3) and images.std() > 10 and (images[0] != images[1]).mean() > 0.5


def test_samples_without_a_network_depend_on_every_step(monkeypatch):
    """Or a wrong step would not show: few of them are at the limits, and fewer steps give others."""
    many = sampling.steps_alone()()
    assert (many.abs() < 0.99).float().mean() > 0.5
    monkeypatch.setattr(sampling, "STEPS_APART", replace(sampling.STEPS_APART, steps=sampling.STEPS - 1))
    assert (sampling.steps_alone()() - many).abs().max() > 5e-4


def test_a_table_is_printed_as_it_is():
    assert list(results(Table("", lambda: "| a |"), TimingConfig())) == ["| a |"]
