"""The parsers of files that others may have written, each with valid files to start from and ways to damage them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import tarfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import cascade_file_making
import decoder_file_making
import numpy as np
import torch
import yaml
from PIL import Image
from shard_making import encoded, npy_bytes, tar_bytes

from diff_dalle.checkpoints.checkpoint import Identity, save_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.run_folder import RECORD, RunFolder, read_run
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sources import read_config
from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.config import from_dict, to_dict
from diff_dalle.data.arrays import read_embedding
from diff_dalle.data.captions import read_caption
from diff_dalle.data.filters import Filter, parse_filters, verdicts
from diff_dalle.data.index import FOLDER, SUMMARY, index_shards
from diff_dalle.data.shard_table import Table, load_column, load_table
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.tar import read_members
from diff_dalle.distributed.world import ALONE
from diff_dalle.images.decode import BrokenSample, decode_image, image_size
from diff_dalle.images.files import read_mask
from diff_dalle.recipes.decoder import DecoderRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.text.vocabulary import OWN_HEADER, read_vocabulary

from . import weight_files
from .contract import Skipped
from .mutations import Make, as_json, damaged, distorted, from_file, json_cases, mixed

SIDE, WIDTH, MAX_PIXELS = 24, 8, 1 << 20


# --------------------------------------------------------------------------------------------------- images, captions


def _pictures() -> list[bytes]:
    found = []
    rough = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 4), dtype=np.uint8)
    for mode, form in (("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("L", "PNG"), ("RGB", "JPEG"), ("RGB", "WEBP")):
        found.append(encoded(Image.fromarray(rough).convert(mode), form))
    exif = Image.Exif()
    exif[0x0112] = 6
    return [*found, encoded(Image.fromarray(rough[..., :3]), exif=exif)]


def _fixed_png(data: bytes) -> bytes:
    """A png whose chunks have the checksums of their damaged content, so that it is not refused for these."""
    fixed, at = bytearray(data), 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            break
        fixed[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(fixed)


def _images(folder: Path):
    seeds = _pictures()
    pngs = [data for data in seeds if data.startswith(b"\x89PNG")]
    case = mixed(partial(damaged, seeds), lambda chance: _fixed_png(damaged(pngs, chance)))
    covers = (None, (8, 8))

    def read(data: bytes) -> None:
        with contextlib.suppress(BrokenSample):
            image_size(data)
        decode_image(data, MAX_PIXELS, covers[len(data) % 2])

    return case, read


def _masks(folder: Path):
    return partial(damaged, _pictures()), from_file(folder / "mask.png", read_mask)


def _captions(folder: Path):
    record = {"caption": "a red circle", "width": 24, "tags": ["a", {"b": None}]}
    record |= {"old_caption": '{"og_caption": "a circle"}', "captions": ["a circle", "a red shape"]}
    asked = parse_filters(FILTERS)
    seeds = [as_json(record), b"a red circle in the top left", "ein großer Kreis 圓".encode()]
    fields = ("txt", "json:caption", '["json", "captions"]', '["json", "old_caption"]')

    def read(data: bytes) -> None:
        verdicts(asked, data)
        read_caption(data, fields[len(data) % 4], chance=lambda: 0.0)

    return json_cases(seeds, record), read


FILTERS = (
    "width > 4.5 and 'red' in caption or not len(tags) < 2",
    "0 < width / 2 <= 12 * 3 - 1 and width in (24, 'a', None)",
    '["caption", "lambda s: s == \'a red circle\'"]',
    '[["width", "tags"], "lambda w, t: -w < len(t) + 1"]',
)


def _filters(folder: Path):
    record = {"caption": "a red circle", "width": 24, "tags": ["a"]}
    return partial(damaged, [text.encode() for text in FILTERS]), lambda data: Filter.parse(
        data.decode("utf-8", "replace")
    ).verdict(record)


def _embeddings(folder: Path):
    arrays = (np.ones(WIDTH, np.float32), np.ones((1, WIDTH), np.float16), np.ones(WIDTH))
    seeds = [npy_bytes(array) for array in arrays]
    for kind, size in (("F32", 4), ("BF16", 2)):
        entry = {"dtype": kind, "shape": [1, WIDTH], "data_offsets": [0, WIDTH * size]}
        header = as_json({"__metadata__": {"format": "pt"}, "embedding": entry})
        seeds.append(len(header).to_bytes(8, "little") + header + b"\x3f" * (WIDTH * size))
    shapes = ((WIDTH,), (3, WIDTH))

    def read(data: bytes) -> np.ndarray:
        return read_embedding("npy" if data[:1] == b"\x93" else "safetensors", data, shapes[len(data) % 2])

    return partial(damaged, seeds), read


# ------------------------------------------------------------------------------------------------------ tars, indexes


def _tar(form: int, name: str) -> bytes:
    files = (("txt", b"a red circle"), ("png", b"x" * 700), ("json", b"{}"))
    return tar_bytes(((f"{name}.{kind}", data) for kind, data in files), form)[:10240]


def _fixed_tar(data: bytes) -> bytes:
    """With the right checksum in every block that may be a header."""
    fixed = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            block = bytearray(data[at : at + 512])
            block[148:156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    return bytes(fixed)


def _tars(folder: Path):
    forms = ((tarfile.USTAR_FORMAT, "0001"), (tarfile.GNU_FORMAT, "0" * 200), (tarfile.PAX_FORMAT, "é" * 120))
    seeds = [_tar(form, name) for form, name in forms]
    case = mixed(partial(damaged, seeds), lambda chance: _fixed_tar(damaged(seeds, chance)))

    def read(data: bytes) -> None:
        members, _ = read_members(lambda offset, size: data[offset : offset + size], len(data))
        assert all(0 <= offset <= offset + size <= len(data) for _, offset, size in members)
        Table.of(members).signatures()

    return case, read


def _indexed(folder: Path) -> tuple[Path, Path]:
    """A shard with its index: the folder, and that of the index."""
    (folder / "0001.tar").write_bytes(_tar(tarfile.USTAR_FORMAT, "0001"))
    index_shards([str(folder / "0001.tar")], ShardFiles())
    return folder, folder / FOLDER


def _tables(folder: Path):
    _, index = _indexed(folder)
    path = index / "0001.tar.npz"
    whole = path.read_bytes()
    with np.load(io.BytesIO(whole)) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays["header"].tobytes())

    def rebuilt(chance: random.Random) -> bytes:
        """A well-formed archive with a strange header or array."""
        changed, name = dict(arrays), chance.choice(list(arrays))
        if name == "header":
            changed[name] = np.frombuffer(as_json(distorted(header, chance)), np.uint8)
        else:
            array = changed[name].astype(np.int64)
            strange = (array[:-1], array[None], array.astype(float), -array, array + chance.choice((7, 1 << 20)))
            changed[name] = chance.choice(strange)
        buffer = io.BytesIO()
        np.savez(buffer, **changed)
        return buffer.getvalue()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found = load_table(str(path))
        if found is not None:
            found[1].signatures()
            found[1].spans(["txt"])
            load_column(str(path), found[0], np.uint8)

    return mixed(partial(damaged, [whole]), rebuilt), read


def _summaries(folder: Path):
    shards, index = _indexed(folder)
    path = index / SUMMARY
    whole = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        (entry,) = index_shards([str(shards / "0001.tar")], ShardFiles())
        assert entry.summary.samples == 1, "an index is believed that contradicts its shard"

    return json_cases([whole], json.loads(whole)), read


# ------------------------------------------------------------------------------------ checkpoints, runs, configurations

MERGES = f"{OWN_HEADER}\na b\nab c</w>\nd e\nde f"
TINY = (
    "--image_size 8 --num_channels 8 --channel_mult 1 --num_res_blocks 1 --attention_resolutions 8 --enc_attn_dim 8 "
    "--enc_depth 1 --enc_heads 1 --text_length 8 --diffusion_steps 50"
)


def _tiny_run(folder: Path) -> tuple[GeneratorRun, Identity]:
    """With a vocabulary of its own, so that the files are small."""
    (folder / "merges.txt").write_text(MERGES)
    run = parse(GeneratorRun, [*TINY.split(), "--bpe_path", str(folder / "merges.txt")])
    return run, run.recipe().open(ALONE).identity()


def _checkpoints(folder: Path):
    run, identity = _tiny_run(folder)
    path = folder / "model.pt"
    save_file(str(path), "model", identity, 1, 8, run.recipe().open(ALONE).network().state_dict())
    whole = path.read_bytes()
    content = torch.load(io.BytesIO(whole), weights_only=True)
    strange: tuple[Any, ...] = (torch.zeros(0), torch.full((2,), float("nan")), torch.zeros(1, dtype=torch.int8))

    def rebuilt(chance: random.Random) -> bytes:
        changed = distorted(content, chance)
        if chance.random() < 0.2 and isinstance(changed, dict):
            changed[chance.choice(list(content))] = chance.choice(strange)
        buffer = io.BytesIO()
        torch.save(changed, buffer)
        return buffer.getvalue()

    read = from_file(path, lambda name: open_network(name, "generator"))
    return mixed(partial(damaged, [whole]), rebuilt, rebuilt), read


def _records(folder: Path):
    _, identity = _tiny_run(folder)
    small = Identity(identity.kind, {"optim": {"lr": 1e-4}}, identity.tokenizer)
    record = RunFolder(small, path=str(folder))
    record.save(4, 32, {"model": {}, "optimizer": {}})
    whole = (folder / RECORD).read_bytes()

    def read(data: bytes) -> None:
        (folder / RECORD).write_bytes(data)
        read_run(str(folder))

    return json_cases([whole], json.loads(whole)), read


def _configs(folder: Path):
    run, _ = _tiny_run(folder)
    value = {"kind": "generator", **{name: to_dict(run)[name] for name in ("model", "optim", "training")}}
    small = {"lr": 1e-4, "channel_mult": [1, 2], "optim": {"ema_rate": [0.9]}, "data": {"data_dir": ["a", "b"]}}
    seeds = [as_json(small), b"lr: 1e-4\nchannel_mult: [1, 2]\noptim:\n  ema_rate: 0.9\nhours: 1.5\n"]
    return json_cases(seeds, value, small), from_file(folder / "config.yaml", _read_config)


def _decoder_files(folder: Path):
    value = decoder_file_making.changed(("data.webdataset_base_url", f"{folder}/{{}}.tar"))
    return json_cases([as_json(value)], value), from_file(
        folder / "decoder.json", lambda path: parse(DecoderRun, ["--config_file", path])
    )


def _cascade_files(folder: Path):
    value = cascade_file_making.content("stage_a", folder, str(folder))
    seeds = [yaml.safe_dump(value).encode()]
    return json_cases(seeds, value), from_file(folder / "cascade.yaml", lambda path: parse_cascade([path]))


def _structures(folder: Path):
    """Nested values as hypothesis invents them, half of them under the names of settings."""
    try:
        from hypothesis import HealthCheck, Phase, given, seed, settings
        from hypothesis import strategies as st
    except ImportError:
        raise Skipped("hypothesis is not installed: pip install 'diff_dalle[test]'") from None
    run, _ = _tiny_run(folder)
    plain = to_dict(run)
    names = [*plain, *(name for section in plain.values() if isinstance(section, dict) for name in section)]
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    keys = st.sampled_from(names) | st.text(max_size=10)
    values = st.recursive(leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))
    ready: list[bytes] = []

    def refill(chance: random.Random) -> None:
        @settings(
            max_examples=250,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @seed(chance.getrandbits(32))
        @given(st.dictionaries(keys, values, max_size=6))
        def collect(value):
            ready.append(as_json(value))

        collect()

    def case(chance: random.Random) -> bytes:
        if not ready:
            refill(chance)
        return ready.pop()

    return case, from_file(folder / "config.yaml", _read_config)


def _read_config(path: str) -> None:
    from_dict(GeneratorRun, read_config(path).settings)


def _vocabularies(folder: Path):
    text = MERGES.encode()
    seeds = [text, text + b"\n", gzip.compress(text, mtime=0)]
    return partial(damaged, seeds), from_file(folder / "merges.txt", read_vocabulary)


PARSERS: dict[str, Make] = {
    "tars": _tars,
    "filters": _filters,
    "captions": _captions,
    "images": _images,
    "embeddings": _embeddings,
    "vocabularies": _vocabularies,
    "masks": _masks,
    "index tables": _tables,
    "index summaries": _summaries,
    "checkpoints": _checkpoints,
    "weights": weight_files.weights,
    "LoRAs": weight_files.loras,
    "ControlNets": weight_files.controlnets,
    "run.json": _records,
    "configurations": _configs,
    "decoder files": _decoder_files,
    "cascade files": _cascade_files,
    "structures (hypothesis)": _structures,
}
