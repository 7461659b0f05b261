"""Checkpoints of a tiny latent cascade: stage A, semantic encoder, stages B and C."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from network_making import randomize

from diff_dalle.checkpoints.cascade import (
    LatentSampling,
    SemanticSettings,
    StageASettings,
    StageBSampling,
    StageBSettings,
    StageCSettings,
    TrainedWith,
)
from diff_dalle.checkpoints.checkpoint import Identity, save_file
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.config import to_dict
from diff_dalle.embeddings.contract import weights_digest
from diff_dalle.models.latent.config import LatentTextConfig
from diff_dalle.models.latent.semantic import SemanticConfig
from diff_dalle.models.latent.stage_a import StageAConfig
from diff_dalle.models.latent.stages import StageBConfig, StageCConfig
from diff_dalle.text.tokenizer import load_tokenizer

SIDE_B, SIDE_C = 64, 48  # pixels of training images: 64 pixels of stage B go with 6 positions of stage C
SHAPE: dict[str, Any] = {
    "widths": (8, 12),
    "heads": (0, 3),
    "levels": ("CT", "CTA"),
    "down_blocks": (1, 1),
    "up_blocks": (1, 1),
    "down_repeats": (1, 1),
    "up_repeats": (1, 1),
    "dropout": (0.0, 0.0),
    "cond_width": 12,
    "vector_tokens": 2,
    "time_width": 6,
}
OWN_TEXT = LatentTextConfig(enc_attn_dim=12, enc_depth=1, enc_heads=2, text_length=12)
A = StageASettings(StageAConfig(width=8, bottleneck_blocks=1, codebook_size=16))
SEMANTIC = SemanticSettings(
    SemanticConfig(stride=8, semantic_channels=3, encoder_width=4, encoder_blocks=1, previewer_width=8)
)
B = StageBSettings(
    StageBConfig(**SHAPE, text=OWN_TEXT, semantic_channels=3, pixel_channels=0),
    sampling=StageBSampling(steps=3, guidance_scale=1.5),
    trained_with=TrainedWith(SIDE_B, stage_a_stride=4, semantic_stride=8),
)
C = StageCSettings(
    StageCConfig(**SHAPE, text=OWN_TEXT, channels=3, image_width=0),
    sampling=LatentSampling(steps=4, guidance_scale=3.0, shift=2.0),
    trained_with=TrainedWith(SIDE_C, semantic_stride=8),
)


@dataclass(frozen=True)
class Files:
    """Paths of the checkpoints; ``load(files.c, **files.rest)`` is the whole cascade."""

    a: str
    semantic: str
    b: str
    c: str

    @property
    def rest(self) -> dict[str, str]:
        return {"stage_b": self.b, "stage_a": self.a}


def make(path: Path, kind: str, settings: Any, seed: int = 0) -> tuple[str, str]:
    """A checkpoint with random weights: its path, and the identity of its weights."""
    own_text = hasattr(settings, "tokenizer") and settings.model.text.enc_attn_dim > 0
    tokenizer = load_tokenizer(settings.tokenizer.bpe_path) if own_text else None
    torch.manual_seed(seed)
    network = randomize(settings.build(tokenizer.vocab_size if tokenizer else 0), seed)
    state = network.state_dict()
    identity = Identity(kind, to_dict(settings), tokenizer.identity if tokenizer else None)
    save_file(str(path), "ema", identity, 5, 50, state)
    return str(path), weights_digest(state)


def make_cascade(folder: Path, b: StageBSettings = B, c: StageCSettings = C, seed: int = 0) -> Files:
    """All four, of which B and C say what they were trained with."""
    a, a_identity = make(folder / "a.pt", "stage_a", A, seed)
    semantic, identity = make(folder / "semantic.pt", "semantic", SEMANTIC, seed)
    b = replace(b, trained_with=replace(b.trained_with, stage_a=a_identity, semantic=identity))
    c = replace(c, trained_with=replace(c.trained_with, semantic=identity))
    return Files(
        a, semantic, make(folder / "b.pt", "stage_b", b, seed)[0], make(folder / "c.pt", "stage_c", c, seed)[0]
    )


def with_clip(path: str, identity: str, width: int, length: int) -> tuple[StageBSettings, StageCSettings]:
    """Stages B and C whose text, and image embeddings, come from a CLIP of ours whose vectors all have this width."""
    clip, text = ClipConfig("diff_dalle", path, identity), LatentTextConfig(enc_attn_dim=0, text_length=length)
    b_model = replace(B.model, text=text, pooled_width=width)
    c_model = replace(C.model, text=text, pooled_width=width, text_width=width, image_width=width)
    return (
        replace(B, model=b_model, trained_with=replace(B.trained_with, text_clip=clip)),
        replace(C, model=c_model, trained_with=replace(C.trained_with, text_clip=clip, image_clip=clip)),
    )
