"""Settings of the metrics of generated images, which need no optional package to be read."""

import subprocess
import sys

import pytest

from diff_dalle.config import InputError, from_dict
from diff_dalle.evaluation.generated_config import GeneratedMetricsConfig


def config(**settings):
    return from_dict(GeneratedMetricsConfig, settings)


def test_the_documented_example_is_read():
    metrics = {"FID": {"feature": 64}, "IS": {"feature": 64, "splits": 10}, "KID": {"feature": 64, "subset_size": 10}}
    found = config(n_evaluation_samples=1000, **metrics, LPIPS={"net_type": "vgg", "reduction": "mean"})
    assert found.FID.feature == found.IS.feature == found.KID.feature == "64" and found.KID.subsets == 100
    assert list(found.given) == ["FID", "IS", "KID", "LPIPS"] and found.LPIPS.net_type == "vgg"
    assert found.cautions() == [] and not found.needs_clip
    assert config().given == {} and config(FID=None).given == {}


def test_defaults_are_torchmetrics():
    """Every key that both have has the same default."""
    import inspect

    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.image.kid import KernelInceptionDistance
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    theirs = (FrechetInceptionDistance, InceptionScore, KernelInceptionDistance, LearnedPerceptualImagePatchSimilarity)
    given = config(FID={}, IS={}, KID={}, LPIPS={}).given
    for metric, other in zip(given.values(), theirs, strict=True):
        for name, parameter in inspect.signature(other).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name != "input_img_size":
                ours, default = getattr(metric, name), parameter.default
                assert (ours or None) == default or str(ours) == str(default), name


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"FID": {"feature": 100}}, "FID.feature is '100', but must be one of 64, 192, 768, 2048, clip, or PACKAGE"),
        ({"FID": {"feature": "logits_unbiased"}}, "but must be one of 64"),
        ({"FID": {"feature": "clipp"}}, "did you mean clip"),
        ({"FID": {"features": 64}}, "FID.features is an unknown setting; did you mean feature"),
        ({"FID": {"normalize": True}}, "normalize is True, but the run knows the range of its images: leave it out"),
        ({"FID": {"compute_on_cpu": True}}, "FID.compute_on_cpu is about how torchmetrics pools"),
        ({"FID": {"input_img_size": [3, 299, 299]}}, "FID.input_img_size is for networks .* leave it out"),
        (
            {"FID": {"feature": "clip", "feature_extractor_weights_path": "x.pth"}},
            "but it is for Inception, and FID.feature is clip",
        ),
        ({"FID": {"feature": "a.b:c", "antialias": False}}, "antialias is False, but it is for Inception"),
        ({"FID": {"reset_real_features": 1}}, "reset_real_features is 1, but must be True or False"),
        ({"IS": {"feature": "clip"}}, "feature is 'clip', but must be one of 64, 192, 768, 2048, logits_unbiased"),
        ({"IS": {"splits": 0}}, "splits is 0, but must be at least 1"),
        ({"IS": {"reset_real_features": False}}, "IS.reset_real_features does not apply"),
        ({"KID": {"subset_size": 1}}, "subset_size is 1, but must be at least 2"),
        ({"KID": {"subsets": 0}}, "subsets is 0, but must be at least 1"),
        ({"KID": {"degree": 0}}, "degree is 0, but must be at least 1"),
        ({"KID": {"gamma": 0}}, "gamma is 0, but must be above 0"),
        ({"KID": {"coef": -1}}, "coef is -1, but must be above 0"),
        ({"LPIPS": {"net_type": "vg"}}, "net_type is 'vg', but must be one of alex, vgg, squeeze; did you mean vgg"),
        ({"LPIPS": {"reduction": "none"}}, "reduction is 'none', but must be one of mean, sum"),
        ({"LPIPS": {"feature": 64}}, "LPIPS.feature does not apply"),
        ({"precision_recall": {"k": 0}}, "k is 0, but must be at least 1"),
        ({"fid": {}}, "fid is an unknown setting"),
        ({"n_evaluation_samples": 0}, "n_evaluation_samples is 0, but must be at least 1"),
        ({"n_evaluation_samples": 1, "FID": {}}, "FID needs at least 2 images, but n_evaluation_samples is 1"),
        (
            {"n_evaluation_samples": 999, "KID": {}},
            "KID.subset_size is 1000, which needs at least 1,000 images, but n_e",
        ),
        ({"n_evaluation_samples": 3, "precision_recall": {}}, "precision_recall.k is 3, which needs at least 4 images"),
        ({"n_evaluation_samples": 5, "density_coverage": {}}, "density_coverage.k is 5, which needs at least 6 images"),
    ],
)
def test_what_cannot_be_is_refused(metrics, words):
    with pytest.raises(InputError, match=words):
        config(**metrics)


def test_all_that_is_wrong_is_named_at_once():
    metrics = {"n_evaluation_samples": 100, "FID": {"feature": 1, "normalze": True}, "KID": {"degree": 0}}
    with pytest.raises(InputError) as caught:
        config(**metrics)
    for words in ("4 settings are wrong", "FID.normalze", "FID.feature is '1'", "KID.degree", "KID.subset_size"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"FID": {}}, "bias of FID is large for 1,000 images in 2048 features"),
        ({"KID": {}}, "KID_std is 0"),
        ({"IS": {"splits": 501}}, "IS is near 1"),
    ],
)
def test_cautions_say_what_the_number_of_images_makes_of_values(metrics, words):
    (found,) = config(**metrics).cautions()
    assert words in found
    assert config(n_evaluation_samples=2049, **metrics).cautions() == []
    assert config(FID={"feature": "clip"}).cautions() == []


def test_reading_the_settings_loads_no_optional_package():
    code = "import sys, diff_dalle.evaluation.generated; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torchmetrics", "torch_fidelity", "torchvision"} & set(loaded)
