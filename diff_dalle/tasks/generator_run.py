"""Everything that a run training a generator is set by, and what is built from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..config import section, to_dict
from ..data.loader import DataConfig, Loader
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..distributed import DistributedConfig, World
from ..errors import InputError
from ..models.generator import Generator, GeneratorConfig
from ..text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from ..tracking.trackers import TrackingConfig
from ..training.checkpoint import Identity
from ..training.loop import TrainingConfig
from ..training.optim import OptimConfig
from .denoising import DenoisingConfig
from .previews import PreviewConfig, Previews

KIND = "generator"


@dataclass(frozen=True)
class GeneratorRun:
    """Settings of ``train_generator.py``; sampling later needs ``model``, ``diffusion`` and ``tokenizer`` only."""

    data: DataConfig = section(DataConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    optim: OptimConfig = section(OptimConfig)
    training: TrainingConfig = section(TrainingConfig)
    preview: PreviewConfig = section(PreviewConfig)
    tracking: TrackingConfig = section(TrackingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def __post_init__(self):
        if self.training.sample_interval:  # refused now rather than at the first preview
            create_gaussian_diffusion(self.diffusion, self.preview.sampler.timestep_respacing)

    @property
    def has_text(self) -> bool:
        return self.model.text.enc_attn_dim > 0

    def identity(self, tokenizer: Tokenizer | None) -> Identity:
        """What the run's checkpoints say about themselves: all but where they lie, which is no property of theirs."""
        config = to_dict(self)
        del config["training"]["logdir"]
        return Identity(KIND, config, tokenizer.identity if tokenizer else None)


def build_tokenizer(run: GeneratorRun) -> Tokenizer | None:
    """The run's tokenizer, or None for a generator without text."""
    return load_tokenizer(run.tokenizer.bpe_path) if run.has_text else None


def build_generator(run: GeneratorRun, tokenizer: Tokenizer | None) -> Generator:
    """The network with its initial weights, the same for the same seed on every rank."""
    torch.manual_seed(run.training.seed)
    return Generator(run.model, tokenizer.vocab_size if tokenizer else 0, run.diffusion.out_channels)


def build_loader(run: GeneratorRun, tokenizer: Tokenizer | None, world: World) -> Loader:
    """The training data, in the order that the seed fixes. InputError when ``data_dir`` is not set or empty."""
    if not run.data.data_dir:
        raise InputError("--data_dir is needed: a folder of shards, a tar, a glob, a brace range or a URL")
    return _loader(run, run.data, tokenizer, world, shuffle=True)


def build_held_out(run: GeneratorRun, tokenizer: Tokenizer | None, world: World) -> Loader | None:
    """The held-out data in the order of its shards, uncropped and unflipped; None without ``val_data_dir``."""
    if not run.training.val_data_dir:
        return None
    plain = replace(run.data, random_crop=False, random_flip=False)
    sources = {"sources": run.training.val_data_dir, "flag": "--val_data_dir"}
    return _loader(run, plain, tokenizer, world, shuffle=False, **sources)


def _loader(run: GeneratorRun, config: DataConfig, tokenizer: Tokenizer | None, world: World, **options) -> Loader:
    return Loader(
        config,
        run.model.unet.image_size,
        tokenizer,
        run.model.text.text_length,
        seed=run.training.seed,
        batch_size=run.training.batch_size,
        rank=world.rank,
        world_size=world.size,
        num_classes=run.model.unet.num_classes,
        device=world.device,
        **options,
    )


def build_previews(run: GeneratorRun, tokenizer: Tokenizer | None, data: Loader) -> Previews | None:
    """Previews of the first conditions of ``data``; None when the run wants none."""
    if not run.training.sample_interval:
        return None
    count = run.preview.preview_samples
    cond = data.batch_at(range(count)).cond.to("cpu")
    if tokenizer:
        captions = [tokenizer.decode(row) for row in cond.tokens.tolist()]
    else:
        captions = [""] * count if cond.labels is None else [str(label) for label in cond.labels.tolist()]
    size = (run.model.unet.image_size,) * 2
    return Previews(run.preview, run.diffusion, cond, captions, size, run.model.unet.num_classes)
