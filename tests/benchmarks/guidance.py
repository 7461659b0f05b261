"""Time of a sampling step with classifier guidance, relative to one without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diff_dalle.diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.guidance import ClassifierGuidance, GuidanceConfig, guided_denoiser
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.noised_clip import NoisedClip, NoisedClipConfig
from diff_dalle.models.unet import UNet, UNetConfig

BATCH_SIZE, STEP, SCALE = 4, 500, 3.0
NETWORK = UNetConfig(image_size=64, num_channels=64, num_res_blocks=2, attention_resolutions=(16, 8))
CLASSIFIER = NoisedClipConfig(
    image_size=64,
    classifier_width=64,
    classifier_depth=2,
    classifier_attention_resolutions=(16, 8),
    classifier_enc_attn_dim=128,
    classifier_enc_depth=1,
)
PROCESS = create_gaussian_diffusion(DiffusionConfig(noise_schedule="cosine"))


class _Problem:
    """A generator without text encoder (which is not timed), a classifier, encoded captions and noisy images."""

    def __init__(self):
        torch.manual_seed(0)
        self.unet = to_channels_last(UNet(NETWORK)).eval().requires_grad_(False)
        self.clip = to_channels_last(NoisedClip(CLASSIFIER, 100)).eval().requires_grad_(False)
        self.text = torch.nn.functional.normalize(torch.randn(BATCH_SIZE, CLASSIFIER.classifier_enc_attn_dim), dim=1)
        self.x = torch.randn(BATCH_SIZE, 3, NETWORK.image_size, NETWORK.image_size)

    def similarity(self, x: Tensor, t: Tensor) -> Tensor:
        return (self.clip.encode_image(x, t) * self.text).sum(1)

    def step(self, classifier: ClassifierGuidance | None) -> Callable[[], Tensor]:
        config = GuidanceConfig(guidance_scale=1.0, thresholding="none")
        denoise = guided_denoiser(PROCESS, lambda x, t, cond: self.unet(x, t), None, None, config, classifier)

        def work():
            with torch.no_grad():
                return denoise(self.x, STEP).x_start

        return work


def unguided() -> Callable[[], Tensor]:
    return _Problem().step(None)


def guided() -> Callable[[], Tensor]:
    problem = _Problem()
    return problem.step(ClassifierGuidance(problem.similarity, SCALE))


def gate() -> dict[str, tuple[float, float]]:
    """Maximum difference between the guided image and the unguided one plus the shift computed by plain autograd."""
    problem = _Problem()
    x = problem.x.clone().requires_grad_()
    problem.similarity(x, torch.full((BATCH_SIZE,), STEP)).sum().backward()
    alpha_bar = PROCESS.alphas_cumprod[STEP]
    expected = unguided()() + SCALE * (1 - alpha_bar) / alpha_bar**0.5 * x.grad
    return {"images": ((guided()() - expected).abs().max().item(), 1e-5)}
