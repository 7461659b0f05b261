"""Metrics of generated images: from chunks, on several processes, with any network."""

import os
import sys

import eval_making
import pytest
import torch
from eval_making import EVERY, QUARTERS, N, chunks, pair, quarters

from diff_dalle.config import InputError, from_dict
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluation.generated import GeneratedMetrics
from diff_dalle.evaluation.generated_config import GeneratedMetricsConfig
from diff_dalle.evaluation.metrics import frechet_distance, inception_score
from diff_dalle.evaluation.pretrained import LEAST_SIZES, URLS


def broken():
    return lambda images: images.float().mean((2, 3)) / 0


NAMES = ["FID", "IS_mean", "IS_std", "KID_mean", "KID_std", "precision", "recall", "density", "coverage"]


def signal(images):
    return images.float() / 127.5 - 1


def metrics(clip=None, count=N, **given):
    return GeneratedMetrics(from_dict(GeneratedMetricsConfig, {"n_evaluation_samples": count, **given}), ALONE, clip)


def linear():
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    return lambda images: images.float().mean((2, 3)) @ weights


class Clip:
    """Mean colors, and what it has seen."""

    identity = "diff_dalle:0123"

    def __init__(self):
        self.seen = []

    def encode_images(self, images):
        self.seen.append(images)
        return images.mean((2, 3))


@pytest.fixture()
def packages(monkeypatch, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    eval_making.install(monkeypatch, tmp_path)
    return tmp_path


def test_every_metric_is_of_the_generated_images_whatever_the_chunks():
    real, generated = pair()
    found = metrics(**EVERY).measure(chunks(real, generated, 7), N)
    assert list(found) == [f"{name} ({QUARTERS})" for name in NAMES]
    values, network = [value for value in found.values()], quarters()
    assert values[0] == pytest.approx(frechet_distance(network(real), network(generated))["frechet_distance"], rel=1e-9)
    assert values[1:3] == pytest.approx(inception_score(network(generated), 3), rel=1e-9)
    whole = metrics(**EVERY).measure([(real, generated, range(N))], N)
    assert whole == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("KID", {"subsets": 5}),
        ("KID", {"subset_size": 11}),
        ("KID", {"degree": 2}),
        ("KID", {"gamma": 0.5}),
        ("KID", {"coef": 2}),
        ("IS", {"splits": 2}),
        ("precision_recall", {"k": 1}),
        ("density_coverage", {"k": 1}),
    ],
)
def test_every_key_has_an_effect(key, settings):
    real, generated = pair()
    chunk = [(real, torch.cat([real[:12].roll(2, 3), generated[12:]]), range(N))]
    changed = metrics(**{key: {**EVERY[key], **settings}}).measure(chunk, N)
    assert changed != metrics(**{key: EVERY[key]}).measure(chunk, N)


def test_images_may_be_floats_or_gray_and_pairs_come_in_any_order_and_twice():
    real, generated = pair()
    expected = metrics(**EVERY).measure([(real, generated, range(N))], N)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    shuffled = [(signal(real[rows]), signal(generated[rows]), rows) for rows in (order[:9], order[5:])]
    assert metrics(**EVERY).measure(shuffled, N) == pytest.approx(expected, rel=1e-9)
    gray = [(real[:, :1], generated[:, :1], range(N))]
    colors = [(real[:, :1].repeat(1, 3, 1, 1), generated[:, :1].repeat(1, 3, 1, 1), range(N))]
    assert metrics(**EVERY).measure(gray, N) == metrics(**EVERY).measure(colors, N)


def test_without_metrics_nothing_is_read():
    assert metrics().measure(iter(lambda: pytest.fail("read"), None), N) == {}


def test_an_evaluation_begins_anew_after_its_values():
    real, generated = pair()
    measured = metrics(**EVERY)
    first = measured.measure([(real, generated, range(N))], N)
    assert measured.measure([(real, generated, range(N))], N) == first
    assert measured.measure([(generated, generated, range(N))], N)[f"FID ({QUARTERS})"] < 1e-9


def test_features_of_real_images_are_kept_if_asked():
    """And are those of the positions that are evaluated."""
    clip, (real, generated) = Clip(), pair()
    measured = metrics(clip, FID={"feature": "clip", "reset_real_features": False})
    name = "FID (clip diff_dalle:0123)"
    first = measured.measure([(real, generated, range(N))], N)
    assert len(clip.seen) == 2
    assert measured.measure([(real, generated, range(N))], N) == first and len(clip.seen) == 3
    few = measured.measure([(real[4:9], generated[4:9], range(4, 9))], 5)
    expected = metrics(clip, FID={"feature": "clip"}).measure([(real[4:9], generated[4:9], range(5))], 5)
    assert few[name] == pytest.approx(expected[name], rel=1e-9)


def test_a_clip_stands_in_and_sees_signals_in_batches():
    clip, (real, generated) = Clip(), pair(130)
    metrics(clip, FID={"feature": "clip"}).add(real, generated, range(130))
    assert max(map(len, clip.seen)) == 64 and len(clip.seen) == 6
    assert torch.equal(torch.cat(clip.seen[:3]), signal(generated)) and torch.equal(
        torch.cat(clip.seen[3:]), signal(real)
    )
    with pytest.raises(InputError, match="feature of a metric is clip, but there is none"):
        metrics(FID={"feature": "clip"})


def test_the_inception_score_reads_no_real_images():
    real, generated = pair()
    scored = metrics(IS={"feature": QUARTERS})
    assert scored.measure([(generated, generated, range(N))], N) == scored.measure([(real, generated, range(N))], N)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda r, g: (r[:3], g, range(N)), r"of one shape, with N positions, not \[3, 3, 32, 32\], \[24, 3"),
        (lambda r, g: (r, g, range(3)), r"\[24, 3, 32, 32\] and 3"),
        (lambda r, g: (r[:, :2], g[:, :2], range(N)), "have 2 channels, but must have 3 or 1"),
        (
            lambda r, g: (signal(r), signal(g) / 0, range(N)),
            "24 generated images of 24 have values that are not finite",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        metrics(**EVERY).add(*arguments(*pair()))


def test_too_few_images_and_bad_features_are_refused():
    real, generated = pair()
    with pytest.raises(
        InputError, match="KID.subset_size is 10, which needs at least 10 images, but the evaluation had 9"
    ):
        metrics(**EVERY).measure([(real[:9], generated[:9], range(9))], N)
    with pytest.raises(InputError, match="FID needs at least 2 images, but the evaluation had 0"):
        metrics(FID={"feature": QUARTERS}).measure([], N)
    with pytest.raises(InputError, match="values that are not finite"):
        metrics(FID={"feature": f"{__name__}:broken"}).add(real, generated, range(N))


def test_an_evaluation_that_failed_leaves_nothing_behind():
    real, generated = pair()
    measured = metrics(FID={"feature": QUARTERS})

    def failing():
        yield real[:9], real[:9], range(100, 109)
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        measured.measure(failing(), N)
    expected = metrics(FID={"feature": QUARTERS}).measure([(real, generated, range(N))], N)
    assert measured.measure([(real, generated, range(N))], N) == expected


def test_features_are_computed_without_the_training_s_autocast():
    real, generated = pair()
    expected = metrics(FID={"feature": f"{__name__}:linear"}).measure([(real, generated, range(N))], N)
    with torch.autocast("cpu", torch.bfloat16):
        assert metrics(FID={"feature": f"{__name__}:linear"}).measure([(real, generated, range(N))], N) == expected


def test_cautions_are_printed(capsys):
    metrics(**{**EVERY, "KID": {"feature": QUARTERS, "subset_size": N}})
    assert "KID_std is 0" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ networks of other packages


def test_layers_of_inception_share_a_network_and_a_pass(packages, monkeypatch):
    weights = packages / "inception.pth"
    eval_making.save_inception(weights)
    given = {"feature_extractor_weights_path": str(weights)}
    every = {
        name: {key: value for key, value in each.items() if key != "feature"} | given for name, each in EVERY.items()
    }
    every["FID"] |= {"feature": 64}
    every["KID"] |= {"feature": 768}
    passes, forward = [], eval_making.Inception.forward
    monkeypatch.setattr(eval_making.Inception, "forward", lambda self, x: passes.append(len(x)) or forward(self, x))
    measured, (real, generated) = metrics(**every), pair()
    found = measured.measure([(real, generated, range(N))], N)
    assert list(found) == NAMES and passes == [N, N] and len(measured.features.networks) == 1

    def features(name, images, antialias=True):
        network = eval_making.Inception("", [name], weights, antialias)
        return forward(network, images).detach()

    expected = frechet_distance(features("64", real), features("64", generated))["frechet_distance"]
    assert found["FID"] == pytest.approx(expected, rel=1e-5)
    assert found["IS_mean"] == pytest.approx(inception_score(features("logits_unbiased", generated), 3)[0], rel=1e-6)
    other = metrics(FID={"feature": 64, "antialias": False, **given}).measure([(real, generated, range(N))], N)
    aliased = [features("64", images, False) for images in (real, generated)]
    assert other["FID"] == pytest.approx(frechet_distance(*aliased)["frechet_distance"], rel=1e-5) != found["FID"]


@pytest.mark.parametrize("net_type", ["alex", "vgg", "squeeze"])
def test_lpips_is_torchmetrics_of_the_pairs(packages, net_type):
    """Mean and sum of the distances of pairs, of torchmetrics' network with weights as torchvision publishes them."""
    from torchmetrics.functional.image.lpips import _LPIPS

    cached = packages / "checkpoints" / URLS[net_type].rpartition("/")[2]
    eval_making.save_lpips(cached, net_type)
    real, generated = pair()
    parts = chunks(real, generated, 7)
    mean, total = (
        metrics(LPIPS={"net_type": net_type, "reduction": reduction}).measure(parts, N)["LPIPS"]
        for reduction in ("mean", "sum")
    )
    network = _LPIPS(net=net_type, pnet_rand=True)
    layers = torch.load(cached)
    for name, parameter in network.net.named_parameters():
        number, part = name.split(".")[-2:]
        parameter.data.copy_(layers[f"features.{number}.{part}"])
    expected = float(network(signal(real), signal(generated)).mean())
    assert mean == pytest.approx(expected, rel=1e-5) and total == pytest.approx(N * expected, rel=1e-5) and mean > 0
    same = metrics(LPIPS={"net_type": net_type}).measure([(real, real, range(N))], N)
    assert same["LPIPS"] == 0
    small = pair(size=LEAST_SIZES[net_type] - 1)
    with pytest.raises(InputError, match=f"too small for LPIPS with {net_type}, which needs"):
        metrics(LPIPS={"net_type": net_type}).add(*small, range(N))


@pytest.mark.parametrize("key", ["FID", "LPIPS"])
def test_weights_are_never_downloaded_and_what_is_no_weights_is_named(packages, key):
    path, setting = packages / "other.pth", f"{key}.feature_extractor_weights_path"
    with pytest.raises(
        InputError, match=f"not in torch's cache, .* get https://.*, and give the file as {setting}, or put"
    ):
        metrics(**{key: {}})
    for content, words in (
        (None, f"{setting} is .*other.pth, which is not a local file"),
        (b"not a file of torch", "other.pth does not hold weights of a network, or is incomplete: get https"),
        ({"state_dict": 1}, "other.pth does not hold weights"),
        ({"a": torch.zeros(1)}, f"{setting} holds the weights of another network"),
        (eval_making.Inception, "does not hold weights"),  # a pickle of anything but tensors
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(InputError, match=words):
            metrics(**{key: {"feature_extractor_weights_path": str(path)}})


def test_files_of_weights_run_no_code(packages):
    class Command:
        def __reduce__(self):
            return os.mkdir, (str(packages / "made"),)

    torch.save({"a": Command()}, packages / "hostile.pth")
    with pytest.raises(InputError, match="does not hold weights"):
        metrics(FID={"feature_extractor_weights_path": str(packages / "hostile.pth")})
    assert not (packages / "made").exists()


@pytest.mark.parametrize(("key", "package"), [("FID", "torch_fidelity"), ("LPIPS", "torchvision")])
def test_missing_and_broken_packages_are_explained(packages, monkeypatch, tmp_path, key, package):
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, package)
    broken = tmp_path / "site" / f"{package}.py"
    for content, words in (
        ("import no_such_package", f"{package} requires the package no_such_package"),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "cannot be imported .operator torchvision::nm",
        ),
    ):
        broken.write_text(content)
        with pytest.raises(InputError, match=words):
            metrics(**{key: {}})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        InputError, match=f"requires the package {package.replace('_', '-')}: pip install .diff_dalle.eval"
    ):
        metrics(**{key: {}})
