"""From seeds and conditions to samples, apart from samplers and guidance."""

import pytest
import torch
from refusing import refused
from torch import nn

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig, create_gaussian_diffusion
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch, sample_steps, seeds_draw
from diff_dalle.images.signal import PixelSignal

PROCESS = create_gaussian_diffusion(DiffusionConfig(100, prediction="x_start"), "3")
GUIDANCE = GuidanceConfig()


class Half(nn.Conv2d):
    """Predicts half of its input, times the labels."""

    def __init__(self):
        super().__init__(3, 3, 1)
        self.sizes = []

    def encode_text(self, cond):
        return cond

    def forward(self, x, t, cond):
        self.sizes.append(len(x))
        return 0.5 * x if cond.labels is None else 0.5 * x * cond.labels.view(-1, 1, 1, 1)


def sample(network=None, cond=Conditioning(), guidance=GuidanceConfig(), channels=3, **options):  # noqa: B008
    batch = SampleBatch(PixelSignal(channels), (4, 6), [3, 2**63 - 1, 2**62], cond, **options)
    return sample_batch(network or Half(), PROCESS, batch, SamplerConfig(), guidance)


def test_each_stage_of_a_cascade_has_its_own_noise():
    assert sample().shape == (3, 3, 4, 6) and (sample() == sample(stage=0)).all()
    assert (sample() != sample(stage=1)).float().mean() > 0.9
    first, second = (seeds_draw([3, 4], stage, "cpu").normal("x", (1000,)) for stage in (0, 1))
    assert torch.corrcoef(torch.cat([first, second])).fill_diagonal_(0).abs().max() < 0.13  # four standard errors


def test_text_is_encoded_once_for_all_steps():
    """The prompts and the negative prompts, and both halves of guidance pass through the network as one batch."""

    class Counting(Half):
        def encode_text(self, cond):
            encoded.append(cond)
            return cond

    encoded, network = [], Counting()
    cond, null = (Conditioning(labels=torch.full((3,), label)) for label in (1, 0))
    sample(network, cond, GuidanceConfig(guidance_scale=3.0), null=null)
    assert len(encoded) == 2 and network.sizes == [6, 6, 6]


@pytest.mark.parametrize("channels", [1, 4])
def test_samples_have_the_channels_of_their_signal(channels):
    assert sample(channels=channels).shape == (3, channels, 4, 6)


def test_thresholding_uses_the_signals_value_range():
    """The last step ends at x_start, which is limited."""

    class Narrow(PixelSignal):
        value_range = (0.25, 0.3)

    class Unbounded(PixelSignal):
        value_range = None

    x = sample_batch(Half(), PROCESS, SampleBatch(Narrow(), (4, 6), [1], Conditioning()), SamplerConfig(), GUIDANCE)
    assert 0.25 - 1e-6 <= x.min() <= x.max() <= 0.3 + 1e-6
    with refused("thresholding is static, .* set it to none"):
        batch = SampleBatch(Unbounded(), (4, 6), [1], Conditioning())
        sample_batch(Half(), PROCESS, batch, SamplerConfig(), GUIDANCE)


def test_classifier_free_guidance_is_on_where_there_is_a_condition_and_never_silently_off():
    cond, null = (Conditioning(labels=torch.full((3,), value)) for value in (1.0, 0.0))
    assert GuidanceConfig().scales(True) == (3, 3) and GuidanceConfig().scales(False) == (1, 1)
    for guidance, expected in ((GuidanceConfig(), 6), (GuidanceConfig(guidance_scale=1.0), 3)):
        network = Half()
        sample(network, cond, guidance, null=null)
        assert network.sizes == [expected] * 3
    unconditional = Half()
    sample(unconditional)
    assert unconditional.sizes == [3] * 3
    with refused("guidance_scale is 2, but there is no caption, class or image embedding"):
        sample(guidance=GuidanceConfig(guidance_scale=2.0))
    with refused("guidance_scale is 3, but null is missing"):
        sample(cond=cond)


def test_what_is_sampled_is_the_last_step():
    batch = SampleBatch(PixelSignal(), (4, 6), [1], Conditioning())
    with torch.no_grad():
        *_, last = sample_steps(Half(), PROCESS, batch, SamplerConfig("heun"), GuidanceConfig())
    x = sample_batch(Half(), PROCESS, batch, SamplerConfig("heun"), GuidanceConfig())
    assert last.t == 0 and torch.equal(x, last.x)
