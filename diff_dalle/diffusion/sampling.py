"""From settings and seeds to images: the process, the guided denoiser and the sampler put together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..config import lookup, option
from ..errors import InputError
from ..images.pixels import to_uint8
from ..randomness import Draw
from .diffusion_config import DiffusionConfig, create_gaussian_diffusion
from .editing import Edit, EditConfig, edited_steps, shortened
from .guidance import ClassifierGuidance, GuidanceConfig, guided_denoiser
from .samplers import SAMPLERS, Step


@dataclass(frozen=True)
class SamplerConfig:
    """Sampler"""

    sampler: str = option("dpm++2m", "how noise is turned into an image", choices=tuple(SAMPLERS), free=True)
    timestep_respacing: str = option(
        "30", "steps to take: 250, or 10,15,20 for that many in each third, or ddim25 for an even stride; empty = "
        "every step of the process", free=True)  # fmt: skip
    eta: float = option(0.0, "randomness of ddim: 0 = none, 1 = that of ancestral sampling", free=True)

    def __post_init__(self):
        lookup(SAMPLERS, self.sampler, "sampler")
        if self.eta and self.sampler != "ddim":
            raise InputError(f"eta is {self.eta:g}, but only the sampler ddim has it, not {self.sampler}")
        if self.eta < 0:
            raise InputError(f"eta is {self.eta:g}, but must not be negative")

    def check_edit(self, edit: EditConfig) -> None:
        """InputError when this sampler cannot make that edit."""
        if edit.variation is not None and (self.sampler == "ancestral" or self.eta):
            used = f"ddim with eta {self.eta:g}" if self.eta else self.sampler
            names = ", ".join(name for name in SAMPLERS if name != "ancestral")
            raise InputError(f"--variation needs a deterministic sampler ({names}) without --eta, not {used}")


def sample_steps(
    generator: nn.Module,
    diffusion: DiffusionConfig,
    cond: Conditioning,
    null: Conditioning,
    size: tuple[int, int],
    seeds: Sequence[int],
    sampler: SamplerConfig,
    guidance: GuidanceConfig,
    classifier: ClassifierGuidance | None = None,
    edit: Edit | None = None,
    stage: int = 0,
) -> Iterator[Step]:
    """Every step on the way to N images; the last step's ``x`` is [N, 3, height, width] in about [-1, 1].

    generator:  the network: called as ``generator(x, t, cond=…)``, with an ``encode_text(cond)`` that is called once.
    cond, null: what the images are to show and what guidance leads away from, N samples each.
    size:       height and width.
    seeds:      one an image. All of an image's noise follows from its seed, so it is the same in any batch.
    classifier: guides towards these N images' captions.
    edit:       N given images of that size to start from, and what is to become of them; its steps may go up again in
                between (see editing.py). Another seed gives another edit.
    stage:      number of the generator in its cascade: each has noise of its own.

    Raises InputError for an edit of other images than N of that size, and for one that the sampler cannot make.
    """
    device = next(generator.parameters()).device
    process = create_gaussian_diffusion(diffusion, sampler.timestep_respacing)
    if edit is not None:
        sampler.check_edit(edit.config)
        wanted = (len(seeds), 3, *size)
        if edit.images.shape != wanted:
            raise InputError(f"images to edit have shape {list(edit.images.shape)}, but must have {list(wanted)}")
        process, edit = shortened(process, edit.strength), edit.to(device)
    cond, null = (generator.encode_text(part.to(device)) for part in (cond, null))
    if cond.mask is None and cond.labels is None:
        guidance = replace(guidance, guidance_scale=1.0)  # an unconditional generator cannot be guided
    denoise = guided_denoiser(process, generator, cond, null, guidance, classifier)
    draw = seeds_draw(seeds, stage, device)

    def noise(name: str) -> Tensor:
        return draw.normal(name, (3, *size))

    walk = functools.partial(SAMPLERS[sampler.sampler], **({"eta": sampler.eta} if sampler.sampler == "ddim" else {}))
    if edit is None:
        yield from walk(process, denoise, noise("sampling start"), lambda t: noise(f"sampling step {t}"))
    else:
        unguided = guided_denoiser(process, generator, cond, None, replace(guidance, guidance_scale=1.0))
        yield from edited_steps(process, walk, denoise, unguided, edit, noise)


def seeds_draw(seeds: Sequence[int], stage: int, device: torch.device) -> Draw:
    """All random numbers of images with these seeds, at a stage of a cascade."""
    return Draw(stage, torch.tensor([seed % 2**63 for seed in seeds], dtype=torch.int64), device)


@torch.no_grad()
def sample_images(*arguments, **keywords) -> np.ndarray:
    """The images at the end of ``sample_steps``, which has the arguments: uint8 [N, height, width, 3]."""
    for step in sample_steps(*arguments, **keywords):
        images = step.x
    return to_uint8(images).cpu().numpy()
