"""Features of images by networks of other packages: Inception, a CLIP, or one of any installed package."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Fault, InputError, named
from ..images.signal import from_levels
from .generated_config import CLIP, FeatureMetric
from .pretrained import Inception

INCEPTION = "inception"
BATCH_SIZE = 64  # images that go through a network at once


class ImageEncoder(Protocol):
    """What is read of a CLIP; see ``embeddings.contract.Clip``."""

    identity: str

    def encode_images(self, images: Tensor) -> Tensor: ...


class Network(NamedTuple):
    """name: inception, clip or PACKAGE.MODULE:FUNCTION; weights, antialias: of Inception."""

    name: str
    weights: str = ""
    antialias: bool = True


class Column(NamedTuple):
    """One feature of a network; those other than Inception have only one."""

    network: Network
    feature: str = ""


def column_of(metric: FeatureMetric) -> Column:
    """The feature that a metric is of."""
    if not metric.is_inception:
        return Column(Network(metric.feature))
    return Column(Network(INCEPTION, metric.feature_extractor_weights_path, metric.antialias), metric.feature)


class FeatureColumns:
    """Images → the features of several networks, each of which sees them once however many of its features are asked
    for.

    columns: with the setting that gives the weights of each, for messages. clip: the one that columns of that name are
    of. Raises InputError for networks, packages and weights that cannot be had.
    """

    def __init__(self, columns: Mapping[Column, str], device: torch.device, clip: ImageEncoder | None = None):
        self.columns, self.device, self.clip = columns, device, clip
        self.networks: dict[Network, Callable[[Tensor], Mapping[str, Tensor]]] = {}
        wrong: list[Fault] = []
        for network in dict.fromkeys(column.network for column in columns):
            try:
                self.networks[network] = self._load(network)
            except InputError as error:
                wrong += error.faults
        InputError.check(wrong)

    def _load(self, network: Network) -> Callable[[Tensor], Mapping[str, Tensor]]:
        if network.name == INCEPTION:
            mine = {column.feature: setting for column, setting in self.columns.items() if column.network == network}
            return Inception(mine, network.weights, network.antialias, self.device, next(iter(mine.values())))
        if network.name == CLIP:
            if (clip := self.clip) is None:
                raise InputError("the feature of a metric is clip, but there is none: give the run one, or set feature")
            return lambda images: {"": clip.encode_images(from_levels(images))}
        other = _imported(network.name, self.device)
        return lambda images: {"": other(images)}

    def label(self, column: Column) -> str:
        """What the names of values say about their features, which are not comparable; nothing for Inception's."""
        if column.network.name == INCEPTION:
            return ""
        whose = f" {self.clip.identity}" if self.clip and column.network.name == CLIP else ""
        return f" ({column.network.name}{whose})"

    @torch.no_grad()
    def __call__(self, images: Tensor, wanted: Collection[Column]) -> dict[Column, Tensor]:
        """uint8 [N, 3, H, W] → [N, D] float32 on the CPU each. InputError when a network returns something else."""
        rows: dict[Column, list[Tensor]] = defaultdict(list)
        for part in images.split(BATCH_SIZE):
            part = part.contiguous().to(self.device)
            for network, compute in self.networks.items():
                if asked := [column for column in wanted if column.network == network]:
                    found = compute(part)
                    for column in asked:
                        rows[column].append(_checked(found[column.feature], len(part)).cpu())
        return {column: torch.cat(parts) for column, parts in rows.items()}


def feature_network(name: str, device: torch.device, logits: bool = False) -> Callable[[np.ndarray], Tensor]:
    """Images, uint8 [N, H, W, 3] → features [N, D] float32, on ``device``, by the network PACKAGE.MODULE:FUNCTION.

    ``inception`` and ``inception:FILE`` are Inception-v3, with weights of torch's cache or of a local file: its 2048
    features or, if ``logits``, its logits. InputError when there is no such network, and when it returns something
    else.
    """
    module, _, file = name.partition(":")
    column = Column(Network(name))
    if module == INCEPTION:
        column = Column(Network(INCEPTION, file), "logits_unbiased" if logits else "2048")
    columns = FeatureColumns({column: f"{named('feature_network')} inception:FILE"}, device)
    return lambda images: columns(torch.from_numpy(images).permute(0, 3, 1, 2), [column])[column].to(device)


def _imported(name: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The network that a function returns when it is called without arguments, in evaluation mode. It maps uint8
    [N, 3, H, W] to features [N, D]. InputError when there is no such function.

    Importing the module runs its code: the name must come from the user.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function.isidentifier()):
        raise InputError(Fault("feature_network", f"must be {INCEPTION} or PACKAGE.MODULE:FUNCTION", name))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(Fault("feature_network", f"{name} cannot be imported: {error}")) from error
    made = make()
    return made.eval().to(device) if isinstance(made, nn.Module) else made


def _checked(found: object, count: int) -> Tensor:
    """What a network returned for ``count`` images, in float32. InputError if it is not [count, D], or not finite."""
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != count:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"the network of features returned {shape} for {count} images, but must return [N, D]")
    if not found.isfinite().all():
        raise InputError("the network of features returned values that are not finite: use other weights or precision")
    return found.float()
