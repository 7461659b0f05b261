"""The table of filters, and every filter but Canny."""

import pickle
import re
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diff_dalle.config import InputError, registry
from diff_dalle.images import plugins
from diff_dalle.images.control_filters.contract import ControlFilter, Materials, as_control
from diff_dalle.images.control_filters.identity import Face, faces_of_insightface
from diff_dalle.images.control_filters.inpainting import box_or_stroke_masks, salient_masks
from diff_dalle.images.control_filters.table import FILTERS, MISSING, PUBLISHED, ControlConfig
from diff_dalle.images.decode import BrokenSample
from diff_dalle.randomness import Draw

ENCODER = Materials(lambda x: torch.nn.functional.avg_pool2d(x, 8).repeat(1, 2, 1, 1), 6, 8)


def pictures(n=4, size=(64, 96), seed=0) -> torch.Tensor:
    return torch.rand(n, 3, *size, generator=torch.Generator().manual_seed(seed))


def draw(n=4, first=0, seed=0) -> Draw:
    return Draw(seed, torch.arange(first, first + n))


def make(name, params="{}", materials=ENCODER) -> ControlFilter:
    return ControlConfig(name, params).create(materials)


class Plugin(ControlFilter):
    channels = 2

    def __call__(self, pictures, draw, masks=None):
        return pictures[:, :2] * draw.uniform("mine").float()[:, None, None, None]


def find_faces(picture):
    vectors = [np.eye(512, dtype=np.float32)[i] for i in range(2)]
    return [Face((0, 0, 31, 31), vectors[0]), Face((33, 32, 60, 95), vectors[1])][: 1 + (picture[0, 0, 0] > 127)]


@pytest.fixture
def installed(monkeypatch):
    """A package with a filter, a face finder and a saliency."""
    values = {
        "diff_dalle.control_filters": {"mine": f"{__name__}:Plugin", "broken": "missing_package:Filter"},
        "diff_dalle.faces": {"faces": f"{__name__}:find_faces"},
        "diff_dalle.saliency": {"left": f"{__name__}:left"},
    }
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def found(group):
        return [EntryPoint(name, value, group) for name, value in values.get(group, {}).items()]

    monkeypatch.setattr("diff_dalle.config.registry.entry_points", found)


def left(picture):
    """More salient to the left."""
    return np.linspace(1, 0, picture.shape[1] // 8)[None].repeat(picture.shape[0] // 8, 0)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [*FILTERS, "mine"])
def test_the_contract(name):
    """Channels, range, a function of position; it can be shown; alone the same as in a batch."""
    each, x = make(name), pictures()
    control = each(x, draw())
    assert control.shape[:2] == (4, each.channels) and control.dtype == torch.float32
    assert name in ("semantic_sr", "mine") or (control.min() >= 0 and control.max() <= 1)
    shown = each.shown(control, x)
    assert shown.shape == x.shape and shown.min() >= 0 and shown.max() <= 1
    for i in range(4):
        torch.testing.assert_close(each(x[i : i + 1], draw(1, i)), control[i : i + 1])
    randomly = name in ("inpaint", "identity", "mine")
    assert torch.equal(each(x, draw(seed=1)), control) is not randomly or name == "identity"


def test_published_names_are_of_filters():
    assert set(PUBLISHED.values()) <= set(FILTERS)
    for published, name in PUBLISHED.items():
        assert ControlConfig(published).filter_class is FILTERS[name]


@pytest.mark.parametrize("name", ["sr", "semantic_sr", "SRFilter", "SREffnetFilter"])
def test_the_published_name_of_a_parameter_is_read(name):
    assert make(name, '{"scale_factor": 0.3}').config.scale == 0.3


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "cany",
            "{}",
            r"^controlnet_filter is 'cany', but must be one of canny, .*; did you mean canny\?; such controls may",
        ),
        ("canny", '{"size": 3}', "controlnet_filter_params.size is an unknown setting; did you mean resize"),
        ("canny", '{"resize": 1}', "resize is 1, but must be at least 8"),
        ("canny", '{"resize": "a"}', "controlnet_filter_params.resize is 'a', but must be an integer"),
        ("canny", "[1]", "controlnet_filter_params is .*, but must be a mapping"),
        ("canny", "{", "controlnet_filter_params is .*, but it is no JSON text"),
        ("picture", '{"a": 1}', "^controlnet_filter_params.a is an unknown setting$"),
        ("sr", '{"scale": 1}', "scale is 1, but must be above 0 and below 1"),
        ("inpaint", '{"p_outpaint": 2}', "p_outpaint is 2, but must be at least 0 and at most 1"),
        ("inpaint", '{"threshold": [0.4, 0.1]}', "threshold is"),
        ("ready", '{"channels": 4}', "channels is 4, but must be 3"),
        ("ready", '{"member": "png"}', "member is 'png', but must be an extension with two parts"),
        ("ready", '{"member": "json"}', "in the shard, since a path in its json is not followed"),
        ("ready", '{"member": "../a.png"}', "member is '../a.png'"),
        ("ready", '{"member": "cond.npy"}', "member is 'cond.npy'"),
        ("identity", '{"max_faces": 0}', "max_faces is 0"),
        ("identity", '{"p_drop": -1}', "p_drop is -1"),
        (
            "identity",
            "{}",
            "controlnet_filter_params.faces is 'insightface', but finding faces requires the package insightface: pip "
            r"install 'diff_dalle\[faces\]'$",
        ),
        (
            "inpaint",
            '{"saliency": "u2"}',
            "controlnet_filter_params.saliency is 'u2', but must name a plug-in, an entry point of the group "
            "diff_dalle.saliency of a package, of which there are opencv: install a package with u2, or train without",
        ),
        (
            "inpaint",
            '{"saliency": "opencv"}',
            "saliency is 'opencv', but saliency requires the package opencv-contrib-python-headless: pip install "
            r"'diff_dalle\[saliency\]'$",
        ),
        (
            "depth",
            "{}",
            "controlnet_filter is 'depth', but must be one of canny, .*, or MODULE.NAME of your own"
            r"; such controls may also be in the shards \(ready\)$",
        ),
        *(
            (
                name,
                "{}",
                rf"controlnet_filter is '{name}', but must be a filter of this library, which {re.escape(what)} are "
                rf"not: use canny, put such controls .* \(ready\), or install a package whose entry point {name} of",
            )
            for name, what in MISSING.items()
        ),
    ],
)
def test_what_a_filter_does_not_take_is_refused(monkeypatch, name, params, message):
    for package in ("cv2", "insightface"):  # not installed
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=message):
        make(name, params)


def test_a_semantic_filter_needs_an_encoder():
    with pytest.raises(InputError, match="semantic_sr, which requires a semantic encoder, but there is none"):
        make("semantic_sr", materials=Materials())


@pytest.mark.usefixtures("installed")
def test_a_broken_plugin_is_named():
    with pytest.raises(InputError, match="controlnet_filter is 'broken', but missing_package:Filter cannot be"):
        make("broken")
    with pytest.raises(InputError, match=r"did you mean mine\?"):
        make("mne")
    with pytest.raises(InputError, match="there are faces, insightface; did you mean faces"):
        make("identity", '{"faces": "facs"}')


def test_faces_are_those_of_insightface(monkeypatch):
    """A stand-in for the package: its arguments, what it reads and what it gives."""
    made, vector = [], np.full(512, 512**-0.5)

    class FaceAnalysis:
        def __init__(self, name, allowed_modules):
            made.append((name, *allowed_modules))

        def prepare(self, ctx_id):
            made.append(ctx_id)

        def get(self, picture):
            assert picture.dtype == np.uint8 and picture.flags.c_contiguous and picture[0, 0].tolist() == [0, 0, 255]
            return [SimpleNamespace(bbox=np.array([32.0, 0.0, 60.0, 31.0]), normed_embedding=vector)]

    app = SimpleNamespace(FaceAnalysis=FaceAnalysis)
    for name, module in (("insightface", SimpleNamespace(app=app)), ("insightface.app", app)):
        monkeypatch.setitem(sys.modules, name, module)
    faces_of_insightface.cache_clear()
    red = torch.tensor([1.0, 0, 0])[:, None, None].expand(3, 64, 96)[None]
    control = make("identity", '{"p_drop": 0, "p_full": 0}')(red, draw(1))
    faces_of_insightface.cache_clear()
    assert made == [("buffalo_l", "detection", "recognition"), -1]
    assert control[0].norm(dim=0).round().tolist() == [[0, 1, 0], [0, 0, 0]]  # left and top come first in its boxes


def test_saliency_is_that_of_opencv(monkeypatch):
    class FineGrained:
        def computeSaliency(self, picture):
            return True, (picture[..., 0] / 255).astype(np.float32)  # of blue, which comes first

    saliency = SimpleNamespace(StaticSaliencyFineGrained_create=FineGrained)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(saliency=saliency))
    blue = torch.zeros(1, 3, 96, 96)
    blue[:, 2, :, :48] = 1
    mask = make("inpaint", '{"saliency": "opencv", "p_outpaint": 0}')(blue, draw(1))[0, 3]
    assert (mask[:, :40] == 1).all() and (mask[:, 56:] == 0).all()
    found = plugins.load_plugin("diff_dalle.saliency", "opencv", "saliency")
    assert pickle.loads(pickle.dumps(found)) is found  # workers call it
    monkeypatch.setattr(FineGrained, "computeSaliency", lambda *_: (False, None))
    with pytest.raises(BrokenSample, match="no saliency"):
        found(np.zeros((4, 4, 3), np.uint8))
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace())
    with pytest.raises(InputError, match="requires the module cv2.saliency, .* install opencv-contrib-python-headless"):
        make("inpaint", '{"saliency": "opencv"}')


# ------------------------------------------------------------------------------------------------------------- pictures


def test_coarse_pixels():
    x = pictures(size=(64, 96))
    control = make("sr", '{"scale": 0.125}')(x, draw())
    assert control.shape == x.shape
    assert torch.equal(control, x[:, :, ::8, ::8].repeat_interleave(8, 2).repeat_interleave(8, 3))
    assert (make("sr")(x, draw())[:, :, ::4, ::4] == x[:, :, ::4, ::4]).all()


def test_semantic_latents_of_coarse_pixels():
    """Of half the size, at the positions of the whole picture; sides that the stride does not divide are rounded."""
    x = pictures(size=(32, 48))
    half = x[:, :, ::2, ::2]
    expected = ENCODER.encode(2 * half - 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
    control = make("semantic_sr")(x, draw())
    torch.testing.assert_close(control, expected)
    odd = make("semantic_sr", '{"scale": 0.4}')(x, draw())
    assert odd.shape == control.shape and not torch.equal(odd, control)
    torch.testing.assert_close(make("semantic_sr").shown(control, x)[:, :, ::2, ::2], half)


def test_ready_made_controls_are_colors_or_gray():
    x = pictures()
    assert torch.equal(make("ready")(x, draw()), x) and torch.equal(make("picture")(x, draw()), x)
    assert torch.equal(make("ready", '{"channels": 1}')(x, draw()), x.mean(1, keepdim=True))
    with pytest.raises(InputError, match="of 1 or 3 channels, but the ControlNet takes 4: leave control_ready out"):
        as_control(x, 4)


# ---------------------------------------------------------------------------------------------------------------- masks


def test_masks_are_boxes_and_strokes_of_a_usual_size():
    masks = box_or_stroke_masks((48, 64), draw(400))
    area = masks.float().mean((1, 2, 3))
    assert masks.shape == (400, 1, 48, 64) and masks.dtype == torch.bool
    assert area.min() > 0.01 and area.max() < 0.8 and 0.1 < area.mean() < 0.4
    boxes = draw(400).uniform("control mask kind") < 0.5
    assert 150 < boxes.sum() < 250
    rows, columns = masks.any(3)[:, 0].sum(1), masks.any(2)[:, 0].sum(1)
    filled = area * 48 * 64 == rows * columns
    assert filled[boxes].float().mean() > 0.3 and not filled[~boxes].any()  # a single box fills its extent
    assert (masks[boxes].float().mean(0) > 0).all() and (masks[~boxes].float().mean(0) > 0).all()  # anywhere
    assert torch.equal(torch.cat([box_or_stroke_masks((48, 64), draw(1, i)) for i in range(8)]), masks[:8])
    assert not torch.equal(box_or_stroke_masks((48, 64), draw(8, seed=1)), masks[:8])


def test_inpainting_hides_what_is_masked():
    x, each = pictures(200, (16, 16)), make("inpaint", '{"p_outpaint": 0.3}')
    control = each(x, draw(200))
    mask = control[:, 3:].bool()
    assert (control[:, :3].masked_select(mask) == 1).all() and torch.equal(
        control[:, :3].masked_select(~mask), x.masked_select(~mask)
    )
    changed = (mask != box_or_stroke_masks((16, 16), draw(200))).flatten(1)
    inverted = changed.all(1)
    assert torch.equal(inverted, changed.any(1)) and 0.2 < inverted.float().mean() < 0.4
    assert torch.equal(each.shown(control, x), control[:, :3])


def test_given_masks_are_used():
    x, masks = pictures(), torch.zeros(4, 1, 64, 96, dtype=torch.bool)
    masks[:, :, 10:20] = True
    assert torch.equal(make("inpaint")(x, draw(), masks)[:, 3:].bool(), masks)
    assert [name for name, each in FILTERS.items() if each.takes_masks] == ["inpaint"]


@pytest.mark.usefixtures("installed")
def test_salient_masks_are_above_a_drawn_threshold():
    x = pictures(64, (32, 48))
    masks = make("inpaint", '{"saliency": "left", "p_outpaint": 0, "threshold": [0.2, 0.8]}')(x, draw(64))[:, 3:]
    shares = masks.mean((1, 2, 3))
    assert (masks[..., :1] == 1).all() and (masks[..., -1:] == 0).all()
    thresholds = 0.2 + 0.6 * draw(64).uniform("control saliency threshold")
    assert (shares - (1 - thresholds)).abs().max() < 0.06


def test_salient_masks_are_smooth():
    """A single salient cell is too small to count; a half of the picture keeps its border."""

    def spot(picture):
        found = np.zeros((30, 30))
        found[15, 15] = 1
        return found

    assert not salient_masks(pictures(1, (96, 96)), spot, torch.tensor([0.5])).any()
    half = salient_masks(pictures(1, (96, 96)), left, torch.tensor([0.5]))[0, 0]
    assert half[:, :44].all() and not half[:, 52:].any()


# ---------------------------------------------------------------------------------------------------------------- faces


@pytest.mark.usefixtures("installed")
def test_faces_are_painted_on_their_boxes():
    x = torch.zeros(2, 3, 64, 96)
    x[1] = 1  # two faces
    control = make("identity", '{"p_drop": 0, "p_full": 0}')(x, draw(2))
    expected = torch.zeros(2, 512, 2, 3)
    expected[:, 0, 0, 0] = 1
    expected[1, 1, 1, 1:] = 1
    assert torch.equal(control, expected)
    assert torch.equal(make("identity", '{"p_drop": 0, "p_full": 0, "max_faces": 1}')(x, draw(2))[1], expected[0])
    full = make("identity", '{"p_drop": 0, "p_full": 1}')(x, draw(2))
    assert (full[0, 0] == 1).all() and torch.equal(full[1], expected[1])
    assert not make("identity", '{"p_drop": 1}')(x, draw(2)).any()
    many = make("identity", '{"p_drop": 0.25, "p_full": 0.5}')(torch.ones(100, 3, 64, 96), draw(100))
    first, second = (many[:, i].amax((1, 2)) for i in range(2))
    assert 60 < first.sum() < 90 and 60 < second.sum() < 90 and not torch.equal(first, second)


def test_a_face_at_the_border_stays_inside(monkeypatch):
    face = Face((-40.0, 80.0, 20.0, 200.0), np.ones(512, dtype=np.float32))
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [SimpleNamespace(name="one", load=lambda: lambda picture: [face])]
    )
    control = make("identity", '{"p_drop": 0, "p_full": 0}')(torch.zeros(1, 3, 64, 96), draw(1))
    assert control[0, 0].tolist() == [[0, 0, 1], [0, 0, 0]]
