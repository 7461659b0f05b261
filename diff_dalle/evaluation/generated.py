"""Metrics of generated images against real ones, from chunks of images on several processes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..config import Fault, InputError, named, quantity
from ..distributed.world import World
from ..images.signal import from_levels, to_uint8
from ..models.precision import autocast_disabled
from .features import BATCH_SIZE, Column, FeatureColumns, ImageEncoder, Network, column_of
from .generated_config import (
    DensityCoverageConfig,
    FeatureMetric,
    FidConfig,
    GeneratedMetricsConfig,
    InceptionScoreConfig,
    KidConfig,
    LpipsConfig,
    PrecisionRecallConfig,
)
from .metrics import (
    density_coverage,
    frechet_distance,
    inception_score,
    kernel_distance_of_subsets,
    precision_recall,
)
from .pretrained import Lpips

_WEIGHTS = "feature_extractor_weights_path"
_LPIPS = Column(Network("lpips"))
Chunk = tuple[Tensor, Tensor, Sequence[int]]  # as ``GeneratedMetrics.add`` takes it


class GeneratedMetrics:
    """The metrics of a config, with their networks, for any number of evaluations.

    ``measure`` makes one; ``add`` and ``compute`` are its parts. The values are those of the images of all processes
    together, the same however many processes there are and in whichever order images come. Features are kept until
    ``compute``, images are not.

    clip: whose features those called ``clip`` are. Raises InputError for packages, networks and weights that cannot be
    had, so that this is known before a training.
    """

    def __init__(self, config: GeneratedMetricsConfig, world: World, clip: ImageEncoder | None = None):
        self.config, self.world = config, world
        self.columns = {key: column_of(m) for key, m in config.given.items() if isinstance(m, FeatureMetric)}
        settings = {column: named(f"{key}.{_WEIGHTS}") for key, column in self.columns.items()}
        self.lpips: Lpips | None = None
        wrong: list[Fault] = []
        try:
            self.features = FeatureColumns(settings, world.device, clip)
        except InputError as error:
            wrong += error.faults
        try:
            if given := config.LPIPS:
                setting = named(f"LPIPS.{_WEIGHTS}")
                self.lpips = Lpips(given.net_type, given.feature_extractor_weights_path, world.device, setting)
        except InputError as error:
            wrong += error.faults
        InputError.check(wrong)
        self.keeps_real = any(not metric.reset_real_features for metric in config.comparisons.values())
        self.real, self.generated = _Rows(), _Rows()
        for text in config.cautions():
            world.print(text)

    def measure(self, chunks: Iterable[Chunk], total: int) -> dict[str, float]:
        """The values for ``chunks`` of this process, as ``add`` takes them; {} without reading any if no metric is
        asked for.

        total: images of all processes, for the progress bar. InputError, on every process, for what one of them cannot
        read, make or measure.
        """
        if not self.config.given:
            return {}
        self.generated, problem = _Rows(), ""
        hidden = None if self.world.is_main else True
        with tqdm(total=total, desc="Evaluating", unit="image", disable=hidden) as bar:
            try:
                for real, generated, positions in chunks:
                    self.add(real, generated, positions)
                    bar.update(min(len(generated) * self.world.size, total - bar.n))
            except InputError as error:  # the others are told, so that none waits for this one
                problem = error.message(named)
        if problems := list(filter(None, self.world.gather(problem))):
            raise InputError(problems[0])
        return self.compute()

    @torch.no_grad()
    def add(self, real: Tensor, generated: Tensor, positions: Sequence[int]) -> None:
        """Add N pairs of a real image and one that was generated for the same embedding or caption.

        real, generated: uint8, or float in [-1, 1], of the same shape [N, 3 or 1, H, W]. positions: of the pairs in the
        evaluation, over all processes; a pair that is added twice counts once. InputError for anything else, and for
        values that are not finite.
        """
        if real.shape != generated.shape or generated.ndim != 4 or len(positions) != len(generated):
            raise InputError(
                f"real and generated images must be [N, C, H, W] of one shape, with N positions, not "
                f"{list(real.shape)}, {list(generated.shape)} and {len(positions)}"
            )
        real, generated = _levels(real, "real"), _levels(generated, "generated")
        with autocast_disabled(self.world.device):
            made: dict[Column, Tensor] = self.features(generated, set(self.columns.values()))
            if self.lpips:
                pairs = zip(real.split(BATCH_SIZE), generated.split(BATCH_SIZE), strict=True)
                made[_LPIPS] = torch.cat([self.lpips(*map(self._signal, pair))[:, None].cpu() for pair in pairs])
            self.generated.add(positions, made)
            if not self.real.has(positions):
                self.real.add(positions, self.features(real, {self.columns[key] for key in self.config.comparisons}))

    def _signal(self, images: Tensor) -> Tensor:
        return from_levels(images.to(self.world.device))

    def compute(self) -> dict[str, float]:
        """The values by name, on every process, and a new beginning.

        FID, IS_mean, IS_std, KID_mean, KID_std, LPIPS, precision, recall, density, coverage: those that are asked for.
        Names of values of other features than Inception's say whose they are, such as ``FID (clip open_clip:…)``.
        InputError for too few images.
        """
        found, known = self.generated.pooled(self.world), self.real.pooled(self.world)
        self.generated = _Rows()
        if not self.keeps_real:
            self.real = _Rows()
        positions = sorted(found.where)
        InputError.check(self.config.shortages(len(positions), "the evaluation had"))
        values = self._values(known.at(positions), found.at(positions)) if self.world.is_main else None
        return self.world.broadcast(values)

    def _values(self, real: Mapping[Column, Tensor], generated: Mapping[Column, Tensor]) -> dict[str, float]:
        device, values = self.world.device, dict[str, float]()
        if device.type != "cuda":  # others may not have float64
            device = torch.device("cpu")
        for key, metric in self.config.given.items():
            column = self.columns.get(key, _LPIPS)
            label = self.features.label(column) if key in self.columns else ""
            sides = [real[column]] if key in self.config.comparisons else []
            sides = [side.to(device) for side in (*sides, generated[column])]
            values |= {name + label: value for name, value in _VALUES[key](metric, *sides).items()}
        return values


def _levels(images: Tensor, which: str) -> Tensor:
    """uint8 [N, 3, H, W], on whatever device the images are."""
    if images.shape[1] not in (1, 3):
        raise InputError(f"{which} images have {images.shape[1]} channels, but must have 3 or 1")
    if images.dtype != torch.uint8:
        if bad := int((~images.isfinite()).flatten(1).any(1).sum()):
            raise InputError(f"{quantity(bad, f'{which} image')} of {len(images)} have values that are not finite")
        images = to_uint8(images).permute(0, 3, 1, 2)
    return images.expand(-1, 3, -1, -1)


class _Pooled(NamedTuple):
    """Rows of columns, of all processes. where: the row of each position."""

    where: dict[int, int]
    columns: dict[Column, Tensor]

    def at(self, positions: Sequence[int]) -> dict[Column, Tensor]:
        rows = [self.where[position] for position in positions]
        return {column: values[rows] for column, values in self.columns.items()}


class _Rows:
    """Rows of columns by position, of this process."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.columns: dict[Column, list[Tensor]] = defaultdict(list)

    def has(self, positions: Sequence[int]) -> bool:
        return set(self.positions).issuperset(positions)

    def add(self, positions: Sequence[int], columns: Mapping[Column, Tensor]) -> None:
        self.positions += map(int, positions)
        for column, rows in columns.items():
            self.columns[column].append(rows)

    def pooled(self, world: World) -> _Pooled:
        own = {column: torch.cat(rows) for column, rows in self.columns.items()}
        parts = [part for part in world.gather((self.positions, own)) if part[0]]
        positions = itertools.chain.from_iterable(positions for positions, _ in parts)
        names = parts[0][1] if parts else ()
        columns = {column: torch.cat([columns[column] for _, columns in parts]) for column in names}
        return _Pooled({position: row for row, position in enumerate(positions)}, columns)


def _fid(metric: FidConfig, real: Tensor, generated: Tensor) -> dict[str, float]:
    return {"FID": frechet_distance(real, generated)["frechet_distance"]}


def _inception_score(metric: InceptionScoreConfig, generated: Tensor) -> dict[str, float]:
    mean, deviation = inception_score(generated, metric.splits)
    return {"IS_mean": mean, "IS_std": deviation}


def _kid(metric: KidConfig, real: Tensor, generated: Tensor) -> dict[str, float]:
    kernel = metric.degree, metric.gamma, metric.coef
    mean, deviation = kernel_distance_of_subsets(real, generated, metric.subsets, metric.subset_size, *kernel)
    return {"KID_mean": mean, "KID_std": deviation}


def _lpips(metric: LpipsConfig, distances: Tensor) -> dict[str, float]:
    total = float(distances.double().sum())
    return {"LPIPS": total if metric.reduction == "sum" else total / len(distances)}


def _precision_recall(metric: PrecisionRecallConfig, real: Tensor, generated: Tensor) -> dict[str, float]:
    return precision_recall(real, generated, metric.k)


def _density_coverage(metric: DensityCoverageConfig, real: Tensor, generated: Tensor) -> dict[str, float]:
    return density_coverage(real, generated, metric.k)


_VALUES: dict[str, Callable[..., dict[str, float]]] = {
    "FID": _fid,
    "IS": _inception_score,
    "KID": _kid,
    "LPIPS": _lpips,
    "precision_recall": _precision_recall,
    "density_coverage": _density_coverage,
}
