"""Files of the four kinds of a latent cascade, and shards for them, small enough to train in seconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.cascade.file import CascadeRun
from diff_dalle.recipes.train import train_recipe

SIDE, SAMPLES = 32, 12  # pixels; samples of a shard
COMMON = {
    "output_path": "", "lr": 1.0e-3, "warmup_updates": 1, "batch_size": 4, "grad_accum_steps": 1, "image_size": SIDE,
    "updates": 4, "save_every": 2, "backup_every": 0,
    "data": {"num_workers": 0}, "loop": {"log_interval": 1, "preview_samples": 2, "preview_share": None},
    "distributed": {"device": "cpu", "threads": 1}, "dtype": "float32",
}  # fmt: skip
TEXT = {"enc_attn_dim": 8, "enc_depth": 1, "enc_heads": 2, "text_length": 8}
UNET = {
    "widths": [8, 8], "heads": [0, 2], "levels": ["CT", "CTA"], "down_blocks": [1, 1], "up_blocks": [1, 1],
    "down_repeats": [1, 1], "up_repeats": [1, 1], "dropout": [0.1, 0.1], "cond_width": 8, "time_width": 8,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "stage_a": {
        "model": {"width": 8, "bottleneck_blocks": 1, "codebook_size": 16},
        "autoencoding": {
            "adversarial_weight": 0.1, "adversarial_start": 2, "revival_interval": 1, "revival_usage": 0.99,
            "discriminator": {"discriminator_depth": 2, "discriminator_width": 8},
        },
    },
    "semantic": {"model": {"stride": 8, "encoder_width": 4, "encoder_blocks": 1, "previewer_width": 8}},
    "stage_b": {
        "model_version": "700M",
        "model": {**UNET, "text": TEXT, "pixel_channels": 0, "micro_conditions": []},
        "adaptive_loss_weight": True,
        "sampling": {"steps": 2},
    },
    "stage_c": {
        "model_version": "1B",
        "model": {**UNET, "text": TEXT, "image_width": 0, "micro_conditions": []},
        "adaptive_loss_weight": True,
        "sampling": {"steps": 2},
    },
}  # fmt: skip


def make_world(folder: Path, shards: int = 2, size: tuple[int, int] = (40, 36)) -> str:
    """Shards of pictures with captions, whose colors follow from their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        files = []
        for row in range(SAMPLES):
            number = shard * SAMPLES + row
            files.append((f"{number:04d}.jpg", encoded(random_image(*size, number))))
            files.append((f"{number:04d}.txt", f"picture {number}".encode()))
        (folder / f"{shard:02d}.tar").write_bytes(tar_bytes(files))
    return str(folder)


def content(kind: str, folder: Path, world: str, *changes: tuple[str, Any]) -> dict[str, Any]:
    """The settings of a file, with other values at some paths."""
    own = {"kind": kind, "experiment_id": "run", "checkpoint_path": str(folder), "webdataset_path": world}
    file = copy.deepcopy({**own, **COMMON, **FILES[kind]})
    file["output_path"] = str(folder / "out")
    for path, value in changes:
        *sections, key = path.split(".")
        node = file
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return file


def write_file(kind: str, folder: Path, world: str, *changes: tuple[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(content(kind, folder, world, *changes)))
    return str(path)


def read(kind: str, folder: Path, world: str, *changes: tuple[str, Any]) -> Any:
    return parse_cascade([write_file(kind, folder, world, *changes)])


def run(kind: str, folder: Path, world: str, *changes: tuple[str, Any]) -> CascadeRun:
    """Train; returns the settings."""
    settings = read(kind, folder, world, *changes)
    train_recipe(settings.recipe(), ALONE)
    return settings


def make_frozen(folder: Path, world: str) -> dict[str, str]:
    """Checkpoints of a stage A and of a semantic encoder, by the keys under which files name them."""
    for kind in ("stage_a", "semantic"):
        run(kind, folder / kind, world, ("loop.preview_samples", 0), ("updates", 2))
    found = {kind: str(folder / kind / "run" / "model000002.pt") for kind in ("stage_a", "semantic")}
    return {"stage_a_checkpoint_path": found["stage_a"], "effnet_checkpoint_path": found["semantic"]}


def frozen_of(kind: str, frozen: dict[str, str]) -> list[tuple[str, Any]]:
    """The changes that give a kind its frozen networks."""
    needed = {"stage_b": [*frozen], "stage_c": ["effnet_checkpoint_path"]}.get(kind, [])
    return [(name, frozen[name]) for name in needed]
