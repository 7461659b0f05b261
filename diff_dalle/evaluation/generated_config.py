"""Settings of the metrics of generated images, as a file gives them: which ones, and with which keys.

Each metric is a section that may be missing. Keys, defaults and ranges are those of torchmetrics' constructors, plus
those that say where networks come from. Nothing here imports torchmetrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ..config import Fault, named, nearest, option, settings
from ..config.bounds import MAX_BATCH

INCEPTION_FEATURES = ("64", "192", "768", "2048", "logits_unbiased")  # by depth
CLIP = "clip"
_POOLING = "is about how torchmetrics pools values of processes, which the run does itself: leave it out"
_REFUSED = {
    **dict.fromkeys(("compute_on_cpu", "compute_with_cache", "dist_sync_on_step", "process_group"), _POOLING),
    **dict.fromkeys(("dist_sync_fn", "distributed_available_fn", "sync_on_compute"), _POOLING),
    "input_img_size": "is for networks whose width torchmetrics has to find out: leave it out",
}
_NORMALIZE = "False, as torchmetrics' default: images already have the network's input range"
_WEIGHTS = "local file of the network's weights; empty = from torch's cache, which is never filled silently"


@settings
class _Metric:
    """A metric with a network."""

    normalize: bool = option(False, _NORMALIZE)
    feature_extractor_weights_path: str = option("", _WEIGHTS)

    refused: ClassVar[dict[str, str]] = _REFUSED
    sized_by: ClassVar[str] = ""  # the setting that says how many images it needs

    def faults(self) -> Iterator[Fault]:
        if self.normalize:
            yield Fault.of(self, "normalize", "the run knows the range of its images: leave it out")

    def least(self) -> int:
        """The number of images that it needs."""
        return 2

    def cautions(self, images: int) -> Iterator[str]:
        """Sentences on what the number of images makes of the value."""
        return iter(())


@settings
class FeatureMetric(_Metric):
    """A metric of a network's features"""

    feature: str = option(
        "2048",
        "width of a layer of Inception-v3 (64, 192, 768, 2048), clip = the run's CLIP, or PACKAGE.MODULE:FUNCTION, "
        "which returns a network from uint8 [N, 3, H, W] to [N, D]; numbers of different features are not comparable",
    )
    antialias: bool = option(
        True,
        "antialias when resizing to 299 pixels: True as torchmetrics, False as the original FID, torch-fidelity and "
        "published numbers",
    )

    features: ClassVar[tuple[str, ...]] = (*INCEPTION_FEATURES[:-1], CLIP)

    @property
    def is_inception(self) -> bool:
        return self.feature in INCEPTION_FEATURES

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        known = ", ".join(self.features)
        rule = f"it is for Inception, and {named('feature')} is {self.feature}"
        if self.feature not in self.features and ":" not in self.feature:
            hint = nearest(self.feature, self.features)
            yield Fault.of(self, "feature", f"must be one of {known}, or PACKAGE.MODULE:FUNCTION{hint}")
        elif not self.is_inception and self.feature_extractor_weights_path:
            yield Fault.of(self, "feature_extractor_weights_path", rule)
        elif not self.is_inception and not self.antialias:
            yield Fault.of(self, "antialias", rule)


@settings
class ComparisonMetric(FeatureMetric):
    """A metric that compares features with those of real images"""

    reset_real_features: bool = option(
        True, "False for any metric = keep all metrics' features of real images for the next evaluation"
    )


@settings
class FidConfig(ComparisonMetric):
    """Fréchet Inception distance"""

    def cautions(self, images: int) -> Iterator[str]:
        if self.is_inception and images <= int(self.feature):
            yield (
                f"the bias of FID is large for {images:,} images in {self.feature} features: compare only values of as "
                f"many images, or generate more than {self.feature}, or choose a smaller feature"
            )


@settings
class InceptionScoreConfig(FeatureMetric):
    """Inception score"""

    feature: str = option(
        "logits_unbiased",
        "logits_unbiased of Inception-v3, or PACKAGE.MODULE:FUNCTION, which returns a network from uint8 [N, 3, H, W] "
        "to logits [N, classes]; as in torchmetrics a layer's width (64, 192, 768, 2048) takes its features for logits",
    )
    splits: int = option(10, "splits of the images for the mean and standard deviation", least=1, most=1_000)

    features: ClassVar[tuple[str, ...]] = INCEPTION_FEATURES
    refused: ClassVar[dict[str, str]] = {
        **_REFUSED,
        "reset_real_features": "does not apply, since the Inception score is of generated images alone: leave it out",
    }

    def cautions(self, images: int) -> Iterator[str]:
        if images < 2 * self.splits:
            yield (
                f"IS is near 1 whatever the images are, because each of its {self.splits} splits has "
                f"{images / self.splits:g} of them: generate more, or set IS.splits to a smaller number"
            )


@settings
class KidConfig(ComparisonMetric):
    """Kernel Inception distance: mean and standard deviation over random subsets"""

    subsets: int = option(100, "random subsets", least=1, most=MAX_BATCH)
    subset_size: int = option(1000, "images in each subset", least=2, most=MAX_BATCH)
    degree: int = option(3, "degree of the kernel (gamma x·y + coef)^degree", least=1, most=10)
    gamma: float | None = option(None, "scale of the kernel; none = 1 / number of features", above=0)
    coef: float = option(1.0, "bias of the kernel", above=0)

    features: ClassVar[tuple[str, ...]] = (*INCEPTION_FEATURES, CLIP)
    sized_by: ClassVar[str] = "subset_size"

    def least(self) -> int:
        return self.subset_size

    def cautions(self, images: int) -> Iterator[str]:
        if images == self.subset_size:
            yield (
                f"KID_std is 0, because every subset is the whole of {images:,} images: set KID.subset_size to a "
                "fraction of it"
            )


@settings
class PrecisionRecallConfig(ComparisonMetric):
    """Precision and recall"""

    k: int = option(3, "nearest neighbors within the ball of an image", least=1, most=MAX_BATCH)

    sized_by: ClassVar[str] = "k"

    def least(self) -> int:
        return self.k + 1


@settings
class DensityCoverageConfig(PrecisionRecallConfig):
    """Density and coverage"""

    k: int = option(5, "nearest neighbors within the ball of a real image", least=1, most=MAX_BATCH)


@settings
class LpipsConfig(_Metric):
    """Learned perceptual image patch similarity of generated images to the real ones of the same embeddings"""

    net_type: str = option("alex", "network: AlexNet, VGG-16 or SqueezeNet", choices=("alex", "vgg", "squeeze"))
    reduction: str = option("mean", "reduction over images", choices=("mean", "sum"))

    refused: ClassVar[dict[str, str]] = {
        **_REFUSED,
        "feature": "does not apply: LPIPS has the networks of net_type",
        "reset_real_features": "does not apply, since LPIPS compares pairs of images: leave it out",
    }

    def least(self) -> int:
        return 1


@settings
class GeneratedMetricsConfig:
    """Metrics of generated images"""

    n_evaluation_samples: int = option(1000, "images to generate for evaluation", free=True, least=1, most=MAX_BATCH)
    FID: FidConfig | None = option(None, "Fréchet Inception distance", free=True)
    IS: InceptionScoreConfig | None = option(None, "Inception score", free=True)
    KID: KidConfig | None = option(None, "kernel Inception distance", free=True)
    LPIPS: LpipsConfig | None = option(None, "perceptual distance to the real images", free=True)
    precision_recall: PrecisionRecallConfig | None = option(None, "Kynkäänniemi et al. 2019", free=True)
    density_coverage: DensityCoverageConfig | None = option(None, "Naeem et al. 2020", free=True)

    def faults(self) -> Iterator[Fault]:
        return self.shortages(self.n_evaluation_samples, f"{named('n_evaluation_samples')} is")

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

    def shortages(self, images: int, counted: str) -> Iterator[Fault]:
        """What so many images are too few for. counted: clause that the number completes, such as "the split has"."""
        for key, metric in self.given.items():
            if images < (least := metric.least()):
                rule, size = f"needs at least {least:,} images, but {counted} {images:,}", metric.sized_by
                yield Fault(f"{key}.{size}", f"is {getattr(metric, size)}, which {rule}") if size else Fault(key, rule)

    def cautions(self) -> list[str]:
        """What the number of images makes of values, in sentences."""
        return [text for metric in self.given.values() for text in metric.cautions(self.n_evaluation_samples)]
