"""What ``sample.py`` reads: prompts, embeddings, pictures and masks, into a request."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

import numpy as np

from .. import storage
from ..config import Fault, InputError, quantity
from ..data.arrays import MAX_HEADER, parse_header
from ..data.inspection import read_captions
from ..data.sources import TARS
from ..diffusion.editing import EditConfig
from ..images.files import EXTENSIONS, image_names, read_image, read_low_res, read_mask
from ..randomness import random_uniform
from ..sampling.classifier import Guide
from ..sampling.control import Control, SteeringConfig
from ..sampling.image_prompts import ImagePrompts
from ..sampling.pipeline import Pipeline
from ..sampling.request import ImageEdit, Request, in_turn
from .sample import PromptConfig

MAX_BYTES = 2**33  # of one array: 700,000 images of 64 × 64 pixels


def read_request(config: PromptConfig, edit: EditConfig, steering: SteeringConfig | None = None) -> Request:
    """The request for exactly ``num_samples`` images, with prompts, labels and images read from their files. InputError
    for missing or unusable prompts or images."""
    prompts, low_res = _prompts(config), None
    embeddings = read_embeddings(config.embeddings) if config.embeddings else None
    images = _read_images(config) if config.images else None
    pictures = _Pictures(config.reconstruct, "--reconstruct")
    control = _read_control(steering, config.whole_mask) if steering is not None and steering.controlnet else None
    given = (() if embeddings is None else embeddings, images or (), pictures, control.images if control else ())
    found = (prompts, config.labels, config.init_image, *given)
    count = config.num_samples or max(map(len, found))
    if config.base_samples:
        low_res, _ = read_samples(config.base_samples)
        count = config.num_samples or max(count, len(low_res))
        low_res = in_turn(low_res, count)
    if config.low_res_dir:
        names, low_res = read_low_res(config.low_res_dir)
        if count > len(names) or config.num_samples:
            raise InputError(
                f"{config.low_res_dir} holds {quantity(len(names), 'image')}, which is the number of images sampled: "
                "give no more prompts, labels or init_image, and leave num_samples out"
            )
        count = len(names)
    return Request.of(
        prompts,
        config.seed,
        num_samples=count,
        labels=config.labels or None,
        negative_prompt=config.negative_prompt,
        size=(config.sample_size[0], config.sample_size[1]) if config.sample_size else None,
        low_res=low_res,
        edit=_read_edit(config, edit) if config.init_image else None,
        embeddings=embeddings,
        images=images,
        reconstruct=pictures if config.reconstruct else None,
        control=control,
    )


def labeled(request: Request, config: PromptConfig, pipeline: Pipeline, guide: Guide | None) -> Request:
    """The request with the classes of ``base_samples``, or else random ones, where none are given and some are needed.
    A random class follows from the seed of its image. guide: what guides the sampling."""
    numbers = [stage.num_classes for stage in pipeline.stages] + [guide.classes if guide else 0]
    classes = min(filter(None, numbers), default=0)
    if request.labels is not None or not classes:
        return request
    labels = read_samples(config.base_samples)[1] if config.base_samples else None
    if labels is None:
        labels = [int(classes * random_uniform(seed, "label", [0])[0]) for seed in request.seeds]
    return replace(request, labels=in_turn(labels, len(request)))


def read_embeddings(path: str) -> np.ndarray:
    """The image embeddings in a .npy file, float32 [N, width]. InputError for a file of anything else."""
    with storage.explained(path), storage.open_read(path) as file:
        data = file.read()
    try:
        values = _array(io.BytesIO(data))
        if values.dtype.kind != "f" or values.ndim != 2 or not values.size:
            raise ValueError(f"a .npy file of {values.dtype} {list(values.shape)}")
    except ValueError as error:
        raise InputError(f"{path} is {error}, but embeddings must be a .npy file of numbers [N, width]") from None
    return values.astype(np.float32)


class _Pictures(Sequence):
    """The pictures in files and folders that ``flag`` names, read when they are asked for: a folder of photos does not
    fit in the memory."""

    def __init__(self, sources: Sequence[str], flag: str):
        self.paths, self.flag = _paths(sources, flag), flag

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i):
        return read_image(self.paths[i], self.flag)


def _paths(sources: Sequence[str], flag: str) -> list[str]:
    """The pictures among ``sources``, files and folders of pictures."""
    paths: list[str] = []
    for given in sources:
        if given.lower().endswith(EXTENSIONS) or os.path.isfile(given):
            paths.append(given)
        else:
            paths += [storage.join(given, name) for name in image_names(given, flag)]
    return paths


def _read_images(config: PromptConfig) -> ImagePrompts:
    pictures = _Pictures(config.images, "--images")
    names = [storage.split(path)[1] for path in pictures.paths]
    return ImagePrompts(pictures, config.image_weights or None, config.interpolate, names)


def _read_control(config: SteeringConfig, whole: bool) -> Control:
    masks = [read_mask(path, "--control_mask", whole) for path in _paths(config.control_mask, "--control_mask")]
    images = _Pictures(config.control_image, "--control_image")
    return Control(images, masks or None, config.control_ready, config.control_scale, config.control_interval)


def _read_edit(config: PromptConfig, edit: EditConfig) -> ImageEdit:
    masks = [read_mask(path, "--mask", config.whole_mask) for path in config.mask]
    return ImageEdit([read_image(path, "--init_image") for path in config.init_image], masks or None, edit)


def _prompts(config: PromptConfig) -> Sequence[str]:
    files = [config.prompts_file] if config.prompts_file else _text_files(config.data_dir)
    if files:
        prompts = [line.strip() for path in files for line in storage.read_text(path).splitlines()]
    elif config.data_dir:
        prompts = read_captions(config.data_dir, config.caption_field, config.num_samples)
    else:
        # a single empty prompt is valid: images without a caption
        return [part.strip() for part in config.prompts.split("|")]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise InputError(f"there are no prompts in {', '.join(files or config.data_dir)}: write one per line")
    return prompts


def _text_files(sources: Sequence[str]) -> list[str]:
    """The text files among ``sources`` and in folders of text files; empty for shards. InputError for both together."""
    found = [(source, _prompt_files(source)) for source in sources]
    texts, shards = ([source for source, files in found if bool(files) == wanted] for wanted in (True, False))
    if texts and shards:
        raise InputError(
            f"--data_dir names text files ({', '.join(texts)}) and shards ({', '.join(shards)}): give one or the other"
        )
    return [path for _, files in found for path in files]


def _prompt_files(source: str) -> list[str]:
    """The text files that a source stands for; none for shards."""
    if source.endswith(".txt"):
        return [source]
    if storage.is_remote(source) or not os.path.isdir(source):
        return []
    files = storage.list_files(source, recursive=True)
    return [] if any(path.lower().endswith(TARS) for path in files) else [p for p in files if p.endswith(".txt")]


def read_samples(path: str) -> tuple[np.ndarray, list[int] | None]:
    """Of a .npz file, as Guided-Diffusion's scripts write them: ``arr_0``, images uint8 [N, h, w, 3], and ``arr_1``, N
    classes; None without these. InputError for a file of anything else."""
    try:
        with storage.explained(path), storage.open_read(path) as file, zipfile.ZipFile(file) as archive:
            images = _member(archive, "arr_0")
            labels = _member(archive, "arr_1") if "arr_1.npy" in archive.namelist() else None
    except (ValueError, KeyError, zipfile.BadZipFile, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise _refused(path, f"cannot be read ({error})") from None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        raise _refused(path, f"has {images.dtype} {list(images.shape)} as arr_0")
    if labels is None:
        return images, None
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise _refused(path, f"has {labels.dtype} {list(labels.shape)} as arr_1")
    return images, labels.tolist()


def _refused(path: str, what: str) -> InputError:
    expected = "it must be a .npz file with arr_0, uint8 [N, h, w, 3], and perhaps arr_1, N classes"
    return InputError(Fault("base_samples", f"{path} {what}: {expected}"))


def _member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        try:
            return _array(file)
        except ValueError as error:
            raise ValueError(f"{name} is {error}") from None


def _array(file: IO[bytes]) -> np.ndarray:
    """A plain array of numbers in the .npy format. Reads no more than it has by its header. ValueError for another."""
    start = file.read(MAX_HEADER + 12)
    header = parse_header(start)
    size = math.prod(header.shape) * header.dtype.itemsize
    if header.dtype.kind not in "iuf" or header.bfloat16:
        raise ValueError(f"a .npy file of {header}")
    if size > MAX_BYTES:
        raise ValueError(f"a .npy file of {size:,} bytes, more than {MAX_BYTES:,}")
    data = start[header.offset :] + file.read(max(header.offset + size - len(start), 0))
    if len(data) < size:
        raise ValueError(f"a .npy file of {quantity(len(data), 'byte')}, not {size:,}")
    values = np.frombuffer(data, header.dtype, count=math.prod(header.shape))
    return values.reshape(header.shape, order="F" if header.fortran_order else "C")
