"""A decoder's file and shards for it, small enough to train in seconds."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
from shard_making import encoded, npy_bytes, random_image, tar_bytes

from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.decoder import DecoderRun, OpenedDecoder, open_decoder

WIDTH, SHARDS, SAMPLES = 6, 4, 5  # samples of a shard
UNET = {
    "dim": 8, "dim_mults": [1, 2], "image_embed_dim": WIDTH, "cond_dim": 8, "attn_heads": 2, "attn_dim_head": 4,
    "resnet_groups": 4, "num_resnet_blocks": 1, "init_cross_embed": False, "init_conv_kernel_size": 3,
}  # fmt: skip
FILE = {
    "decoder": {"unets": [UNET], "image_sizes": [8], "timesteps": 20, "sample_timesteps": 2},
    "data": {
        "webdataset_base_url": "", "num_workers": 0, "batch_size": 4, "shard_width": 2, "index_width": 2,
        "splits": {"train": 0.5, "val": 0.25, "test": 0.25},
    },
    "train": {
        "epochs": 2, "lr": 1e-3, "n_sample_images": 2, "device": "cpu", "save_every_n_samples": 8, "log_interval": 1,
        "preview_share": None,
    },
    "tracker": {"log": {"log_type": "console"}, "save": {"save_to": "local", "save_latest_to": "latest.pth"}},
}  # fmt: skip


def embedding(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(WIDTH).astype(np.float32)


def make_world(folder: Path, shards: int = SHARDS, member: str = "img_emb.npy", form: str = "{:02d}.tar") -> str:
    """Shards of pictures with captions and embeddings; returns the value of webdataset_base_url."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        files = []
        for row in range(SAMPLES):
            number = shard * SAMPLES + row
            files.append((f"{shard:02d}{row:02d}.jpg", encoded(random_image(24, 20, number))))
            files.append((f"{shard:02d}{row:02d}.txt", f"picture {number}".encode()))
            if member:
                files.append((f"{shard:02d}{row:02d}.{member}", npy_bytes(embedding(number))))
        (folder / form.format(shard)).write_bytes(tar_bytes(files))
    return str(folder / form.replace("{:02d}", "{}"))


def changed(*changes: tuple[str, object]) -> dict:
    """``FILE`` with other values at some paths."""
    file = copy.deepcopy(FILE)
    for path, value in changes:
        *sections, key = path.split(".")
        node = file
        for section in sections:
            node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
        node[key] = value
    return file


def write_file(folder: Path, *changes: tuple[str, object], world: str = "") -> str:
    """The path of a file with these changes; savers keep latest.pth in the working directory."""
    own = [("data.webdataset_base_url", world), ("tracker.data_path", str(folder / "run"))]
    path = folder / "decoder.json"
    path.write_text(json.dumps(changed(*own, *changes)))
    return str(path)


def read_run_file(path: str, *flags: str) -> DecoderRun:
    return parse(DecoderRun, ["--config_file", path, *flags])


def opened(path: str, *flags: str) -> OpenedDecoder:
    """What the run of a file trains on."""
    return open_decoder(read_run_file(path, *flags).recipe(), ALONE)
