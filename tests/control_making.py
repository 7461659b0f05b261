"""Tiny bases, ControlNets for them, and shards to train them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from script_running import run
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.checkpoints.checkpoint import Identity, load_file, save_file
from diff_dalle.checkpoints.controlnets import BaseRecord, ControlNetSettings, StageCControlNetSettings
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.config import to_dict
from diff_dalle.embeddings.contract import weights_digest
from diff_dalle.images.control_filters.table import ControlConfig
from diff_dalle.models.adapters.controlnet import UnetControlConfig
from diff_dalle.models.adapters.latent_controlnet import LatentControlConfig

QUICK: dict[str, Any] = {
    "controlnet_filter": "canny",
    "controlnet_filter_params": '{"resize": 0, "low": 10, "high": 30}',
    "hint_channels": 8,
    "batch_size": 4,
    "iterations": 2,
    "log_interval": 1,
    "sample_interval": 0,
    "num_workers": 0,
    "ema_rate": 0.5,
    "precision": "fp32",
    "device": "cpu",
    "threads": 1,
    "lr": 0.01,
    "warmup_steps": 0,
}


def make_pictures(folder: Path, count: int = 16) -> str:
    """A shard of smooth pictures of 16 pixels with captions, and ready-made controls that are their negatives."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for i in range(count):
        image = random_image(16, 16, i)
        files.append((f"{i:03d}.png", encoded(image, "PNG")))
        files.append((f"{i:03d}.cond.png", encoded(Image.fromarray(255 - np.asarray(image)), "PNG")))
        files.append((f"{i:03d}.txt", f"picture {i}".encode()))
    (folder / "0.tar").write_bytes(tar_bytes(files))
    return str(folder)


def flags_of(base: str, data: str, logdir: Path, **changed: Any) -> list[str]:
    settings = {**QUICK, "model_path": base, "data_dir": data, "logdir": logdir, **changed}
    return [str(part) for name, value in settings.items() for part in (f"--{name}", value)]


def train_controlnet(base: str, data: str, logdir: Path, **changed: Any):
    """Run the script; options of ``run`` begin with an underscore."""
    options = {name.removeprefix("_"): changed.pop(name) for name in list(changed) if name.startswith("_")}
    return run("train_controlnet.py", *flags_of(base, data, logdir, **changed), **options)


def make_controlnet(
    base: str, path: Path, name: str = "canny", params: str = '{"resize": 0, "low": 10, "high": 30}', **sections: Any
) -> str:
    """A ControlNet with random weights for a generator or stage C; sections: further ones of its settings."""
    saved = open_network(base, (kind := load_file(base)["kind"]))
    settings_class, own = {
        "generator": (ControlNetSettings, {"controlnet": UnetControlConfig(8)}),
        "stage_c": (StageCControlNetSettings, {"controlnet": LatentControlConfig((0, 2), "simple")}),
    }[kind]
    channels = sections.pop("channels", 0) or ControlConfig(name, params).create().channels
    record = BaseRecord(weights_digest(saved.load(torch.device("cpu")).state_dict()), 16)
    settings = settings_class(
        **{**own, **sections}, control=ControlConfig(name, params, channels), model=saved.settings.model, base=record
    )
    torch.manual_seed(0)
    network = settings.build()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    save_file(str(path), "ema", Identity(settings.name, to_dict(settings)), 3, 12, network.state_dict())
    return str(path)
