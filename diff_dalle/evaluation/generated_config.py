"""Settings of the metrics of generated images, as a file gives them: which ones, and with which keys.

Each metric is a section that may be missing. Keys, defaults and ranges are those of torchmetrics' constructors, plus
those that say where networks come from. Nothing here imports torchmetrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..config import Problems, nearest, option
from ..errors import InputError

INCEPTION_FEATURES = ("64", "192", "768", "2048", "logits_unbiased")  # by depth
CLIP = "clip"
_POOLING = "is about how torchmetrics pools values of processes, which the run does itself: leave it out"
_REFUSED = {
    **dict.fromkeys(("compute_on_cpu", "compute_with_cache", "dist_sync_on_step", "process_group"), _POOLING),
    **dict.fromkeys(("dist_sync_fn", "distributed_available_fn", "sync_on_compute"), _POOLING),
    "input_img_size": "is for networks whose width torchmetrics has to find out: leave it out",
}
_NORMALIZE = "False, as torchmetrics' default: the run gives images in the range that the network takes"
_WEIGHTS = "local file of the network's weights; empty = that of torch's cache, which is never filled silently"


@dataclass(frozen=True)
class _Metric:
    """A metric with a network."""

    normalize: bool = option(False, _NORMALIZE)
    feature_extractor_weights_path: str = option("", _WEIGHTS)

    refused: ClassVar[dict[str, str]] = _REFUSED
    sized_by: ClassVar[str] = ""  # the setting that says how many images it needs

    def __post_init__(self):
        Problems.check(self.problems())

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings: sentences that begin with a setting's name."""
        if self.normalize:
            yield "normalize is True, but the run knows the range of its images: leave it out"

    def least(self) -> int:
        """The number of images that it needs."""
        return 2

    def cautions(self, images: int) -> Iterator[str]:
        """Sentences on what the number of images makes of the value."""
        return iter(())


@dataclass(frozen=True)
class FeatureMetric(_Metric):
    """A metric of a network's features"""

    feature: str = option(
        "2048",
        "width of a layer of Inception-v3 (64, 192, 768, 2048), clip = the run's CLIP, or PACKAGE.MODULE:FUNCTION, "
        "which returns a network from uint8 [N, 3, H, W] to [N, D]; numbers of different features are not comparable",
    )
    antialias: bool = option(
        True,
        "how Inception's input is resized to 299 pixels: True as torchmetrics, False as the first FID, torch-fidelity "
        "and published numbers",
    )

    features: ClassVar[tuple[str, ...]] = (*INCEPTION_FEATURES[:-1], CLIP)

    @property
    def is_inception(self) -> bool:
        return self.feature in INCEPTION_FEATURES

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        known = ", ".join(self.features)
        if self.feature not in self.features and ":" not in self.feature:
            hint = nearest(self.feature, self.features)
            yield f"feature is {self.feature!r}, but must be one of {known}, or PACKAGE.MODULE:FUNCTION{hint}"
        elif not self.is_inception and self.feature_extractor_weights_path:
            yield f"feature_extractor_weights_path is given, but it is for Inception, and feature is {self.feature}"
        elif not self.is_inception and not self.antialias:
            yield f"antialias is False, but it is for Inception, and feature is {self.feature}"


@dataclass(frozen=True)
class ComparisonMetric(FeatureMetric):
    """A metric that compares features with those of real images"""

    reset_real_features: bool = option(
        True, "False, of any metric = keep the features of real images, of all metrics, for the next evaluation"
    )


@dataclass(frozen=True)
class FidConfig(ComparisonMetric):
    """Fréchet Inception distance"""

    def cautions(self, images: int) -> Iterator[str]:
        if self.is_inception and images <= int(self.feature):
            yield (
                f"the bias of FID is large for {images:,} images in {self.feature} features: compare only values of as "
                f"many images, or generate more than {self.feature}, or choose a smaller feature"
            )


@dataclass(frozen=True)
class InceptionScoreConfig(FeatureMetric):
    """Inception score"""

    feature: str = option(
        "logits_unbiased",
        "logits_unbiased of Inception-v3, or PACKAGE.MODULE:FUNCTION, which returns a network from uint8 [N, 3, H, W] "
        "to logits [N, classes]; as in torchmetrics a layer's width (64, 192, 768, 2048) takes its features for logits",
    )
    splits: int = option(10, "parts of the images, over which the mean and standard deviation are taken")

    features: ClassVar[tuple[str, ...]] = INCEPTION_FEATURES
    refused: ClassVar[dict[str, str]] = {
        **_REFUSED,
        "reset_real_features": "does not apply, since the Inception score is of generated images alone: leave it out",
    }

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.splits < 1:
            yield f"splits is {self.splits}, but must be at least 1"

    def cautions(self, images: int) -> Iterator[str]:
        if images < 2 * self.splits:
            yield (
                f"IS is near 1 whatever the images are, because each of its {self.splits} splits has "
                f"{images / self.splits:g} of them: generate more, or set IS.splits to a smaller number"
            )


@dataclass(frozen=True)
class KidConfig(ComparisonMetric):
    """Kernel Inception distance: mean and standard deviation over random subsets"""

    subsets: int = option(100, "random subsets")
    subset_size: int = option(1000, "images in each subset")
    degree: int = option(3, "degree of the kernel (gamma x·y + coef)^degree")
    gamma: float | None = option(None, "scale of the kernel; none = 1 / number of features")
    coef: float = option(1.0, "bias of the kernel")

    features: ClassVar[tuple[str, ...]] = (*INCEPTION_FEATURES, CLIP)
    sized_by: ClassVar[str] = "subset_size"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name, value, least in (("subsets", self.subsets, 1), ("subset_size", self.subset_size, 2)):
            if value < least:
                yield f"{name} is {value}, but must be at least {least}"
        if self.degree < 1:
            yield f"degree is {self.degree}, but must be at least 1"
        for key, number in (("gamma", self.gamma), ("coef", self.coef)):
            if number is not None and number <= 0:
                yield f"{key} is {number:g}, but must be above 0"

    def least(self) -> int:
        return self.subset_size

    def cautions(self, images: int) -> Iterator[str]:
        if images == self.subset_size:
            yield (
                f"KID_std is 0, because every subset is the whole of {images:,} images: set KID.subset_size to a "
                "fraction of it"
            )


@dataclass(frozen=True)
class PrecisionRecallConfig(ComparisonMetric):
    """Precision and recall"""

    k: int = option(3, "nearest neighbors within the ball of an image")

    sized_by: ClassVar[str] = "k"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.k < 1:
            yield f"k is {self.k}, but must be at least 1"

    def least(self) -> int:
        return self.k + 1


@dataclass(frozen=True)
class DensityCoverageConfig(PrecisionRecallConfig):
    """Density and coverage"""

    k: int = option(5, "nearest neighbors within the ball of a real image")


@dataclass(frozen=True)
class LpipsConfig(_Metric):
    """Learned perceptual image patch similarity of generated images to the real ones of the same embeddings"""

    net_type: str = option("alex", "network: AlexNet, VGG-16 or SqueezeNet", choices=("alex", "vgg", "squeeze"))
    reduction: str = option("mean", "of the images' values", choices=("mean", "sum"))

    refused: ClassVar[dict[str, str]] = {
        **_REFUSED,
        "feature": "does not apply: LPIPS has the networks of net_type",
        "reset_real_features": "does not apply, since LPIPS compares pairs of images: leave it out",
    }

    def least(self) -> int:
        return 1


@dataclass(frozen=True)
class GeneratedMetricsConfig:
    """Metrics of generated images"""

    n_evaluation_samples: int = option(1000, "images that are generated to evaluate the model", free=True)
    FID: FidConfig | None = option(None, "Fréchet Inception distance", free=True)
    IS: InceptionScoreConfig | None = option(None, "Inception score", free=True)
    KID: KidConfig | None = option(None, "kernel Inception distance", free=True)
    LPIPS: LpipsConfig | None = option(None, "perceptual distance to the real images", free=True)
    precision_recall: PrecisionRecallConfig | None = option(None, "Kynkäänniemi et al. 2019", free=True)
    density_coverage: DensityCoverageConfig | None = option(None, "Naeem et al. 2020", free=True)

    def __post_init__(self):
        if self.n_evaluation_samples < 1:
            raise InputError(f"n_evaluation_samples is {self.n_evaluation_samples}, but must be at least 1")
        Problems.check(self.shortages(self.n_evaluation_samples, "n_evaluation_samples is"))

    @property
    def given(self) -> dict[str, FeatureMetric | LpipsConfig]:
        """The metrics that are asked for, by key."""
        found: dict[str, FeatureMetric | LpipsConfig | None] = {
            "FID": self.FID,
            "IS": self.IS,
            "KID": self.KID,
            "LPIPS": self.LPIPS,
            "precision_recall": self.precision_recall,
            "density_coverage": self.density_coverage,
        }
        return {key: metric for key, metric in found.items() if metric is not None}

    @property
    def comparisons(self) -> dict[str, ComparisonMetric]:
        """Those that compare features with those of real images."""
        return {key: metric for key, metric in self.given.items() if isinstance(metric, ComparisonMetric)}

    @property
    def needs_clip(self) -> bool:
        """Whether a metric is one of features of the run's CLIP."""
        return any(isinstance(metric, FeatureMetric) and metric.feature == CLIP for metric in self.given.values())

    def shortages(self, images: int, counted: str) -> Iterator[str]:
        """What so many images are too few for: sentences that begin with a setting's path. counted: clause that the
        number completes, such as "the split has"."""
        for key, metric in self.given.items():
            if images < (least := metric.least()):
                subject = (
                    f"{key}.{metric.sized_by} is {getattr(metric, metric.sized_by)}, which" if metric.sized_by else key
                )
                yield f"{subject} needs at least {least:,} images, but {counted} {images:,}"

    def cautions(self) -> list[str]:
        """What the number of images makes of values, in sentences."""
        return [text for metric in self.given.values() for text in metric.cautions(self.n_evaluation_samples)]
