"""Training a ControlNet of stage C from the documented file."""

from dataclasses import replace

import pytest
import torch
import yaml
from cascade_file_making import COMMON, FILES, SIDE, frozen_of, run
from checkpoint_making import make_classifier_file
from script_running import run as run_script

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands.info import describe_file
from diff_dalle.commands.training_kinds import inferred_kind, parse_cascade
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.cascade.session import identity_of
from diff_dalle.recipes.train import train_recipe

QUIET = ("loop.preview_samples", 0)
# The documented example, at another size: its keys and no others, but for what makes it quick.
EXAMPLE = {
    "experiment_id": "run",
    "controlnet_blocks": [0, 1, 3],
    "controlnet_filter": "CannyFilter",
    "controlnet_filter_params": {"resize": 16},
    "controlnet_bottleneck_mode": "semantic",
}


def make_base(folder, world, frozen, *changes) -> str:
    run("stage_c", folder, world, *frozen_of("stage_c", frozen), QUIET, ("updates", 1), *changes)
    return str(folder / "run" / "model000001.pt")


@pytest.fixture(scope="module")
def base(tmp_path_factory, world, frozen):
    return make_base(tmp_path_factory.mktemp("base"), world, frozen)


def example(folder, world, frozen, path, **changes) -> str:
    """A file; None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        **COMMON,
        **EXAMPLE,
        "checkpoint_path": str(folder),
        "output_path": str(folder / "out"),
        "webdataset_path": world,
        "effnet_checkpoint_path": frozen["effnet_checkpoint_path"],
        "generator_checkpoint_path": path,
        "sampling": {"steps": 2},
        "loop": {"log_interval": 1, "preview_samples": 0},
        **changes,
    }
    path = folder / "controlnet.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return str(path)


def train_example(folder, world, frozen, path, **changes):
    settings = parse_cascade([example(folder, world, frozen, path, **changes)])
    train_recipe(settings.recipe(), ALONE)
    return settings


def test_the_documented_file_trains(tmp_path, world, frozen, base):
    """Its kind follows from its keys; the base's settings from the base; previews show the controls."""
    path = example(
        tmp_path,
        world,
        frozen,
        base,
        updates=2,
        loop={"log_interval": 1, "preview_samples": 2},
        captions_getter=["txt", "identity"],
        use_fsdp=False,
        ema_start_iters=1,
        ema_iters=1,
        ema_beta=0.5,
        model_version="1B",
        model=FILES["stage_c"]["model"],
    )
    out = run_script("train_cascade.py", path)
    assert "Trained for 2 steps" in out.stdout
    assert list((tmp_path / "out" / "run").glob("*.png"))
    saved = open_network(str(tmp_path / "run" / "model000002.pt"), "stage_c_controlnet")
    own = open_network(base, "stage_c").settings
    assert saved.settings.model == own.model and saved.settings.base.image_size == SIDE
    assert saved.settings.base.identity == identity_of(open_network(base, "stage_c").load(torch.device("cpu")))
    assert saved.settings.control.control_channels == 1
    assert saved.settings.controlnet.backbone.semantic.stride == 8
    network = saved.load(torch.device("cpu"))
    assert sorted(network.projections) == ["0", "1", "3"]
    assert all(module[2].weight.any() for module in network.projections.values())
    text = describe_file(str(tmp_path / "run" / "ema_0.5_000002.pt"))
    assert (
        f"steers the base {saved.settings.base.identity} by controls of 1 channels, which the filter CannyFilter"
        in text
    )
    assert f"GFLOPs for a forward pass over one image of {SIDE}×{SIDE} pixels" in text


def test_the_kind_follows_from_the_keys():
    assert inferred_kind({"controlnet_filter": "CannyFilter", "previewer_checkpoint_path": "p"}) == "stage_c_controlnet"
    assert inferred_kind({"previewer_checkpoint_path": "p"}) == "stage_c"


def test_the_other_script_takes_the_file_too(tmp_path, world, frozen, base):
    path = example(tmp_path, world, frozen, base, kind="stage_c_controlnet", updates=1)
    assert "Trained for 1 step" in run_script("train_controlnet.py", "--config", path).stdout


def test_a_threshold_of_no_saliency_is_told(tmp_path, world, frozen, base, capsys):
    """As the documented file of inpainting has one."""
    params = {"p_outpaint": 0.4}
    for given, told in ((params, 0), ({**params, "thresold": [0.04, 0.4]}, 1)):
        changes = {"controlnet_filter": "InpaintFilter", "controlnet_filter_params": given}
        parse_cascade([example(tmp_path, world, frozen, base, **changes)]).recipe().open(ALONE)
        assert (
            capsys.readouterr().out.count("Note: controlnet_filter_params has a threshold of saliency, which") == told
        )


@pytest.mark.parametrize(
    ("mode", "name", "params", "channels"),
    [
        ("simple", "BaseFilter", None, 3),
        ("large", "SREffnetFilter", {"scale": 0.5}, 16),
        ("semantic", "InpaintFilter", None, 4),
        ("simple", "SRFilter", {"scale": 0.25}, 3),
    ],
)
def test_filters_and_backbones(tmp_path, world, frozen, base, mode, name, params, channels):
    changes = {"controlnet_bottleneck_mode": mode, "controlnet_filter": name, "controlnet_filter_params": params}
    if mode == "large":
        changes["controlnet"] = {"backbone": {"large_width": 8, "large_blocks": 1}}
    train_example(tmp_path, world, frozen, base, updates=1, **changes)
    settings = open_network(str(tmp_path / "run" / "model000001.pt"), "stage_c_controlnet").settings
    assert settings.control.control_channels == channels and settings.controlnet.controlnet_bottleneck_mode == mode


def test_weights_to_start_from(tmp_path, world, frozen, base):
    """Those of a ControlNet; the base's are another key."""
    train_example(tmp_path / "first", world, frozen, base, updates=1)
    path = str(tmp_path / "first" / "run" / "model000001.pt")
    train_example(tmp_path / "second", world, frozen, base, updates=1, controlnet_checkpoint_path=path, lr=1e-9)
    first, second = (
        load_file(str(tmp_path / name / "run" / "model000001.pt"))["state"] for name in ("first", "second")
    )
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-6, rtol=1e-6)
    with pytest.raises(InputError, match="holds a stage_c, but a stage_c_controlnet is required"):
        train_example(tmp_path / "third", world, frozen, base, controlnet_checkpoint_path=base)


def test_what_goes_on_from_a_published_one_squashes_as_it(tmp_path, world, frozen, base, capsys):
    """Unless the file says the form itself."""
    params = {"resize": 16, "resize_form": "square"}
    train_example(tmp_path / "first", world, frozen, base, updates=1, controlnet_filter_params=params)
    path = str(tmp_path / "first" / "run" / "model000001.pt")
    for given, start, form in (
        ({"resize": 16}, path, "square"),
        ({"resize": 16, "resize_form": "ratio"}, path, "ratio"),
        ({"resize": 16}, None, "ratio"),
    ):
        changes = {"controlnet_filter_params": given, "controlnet_checkpoint_path": start}
        capsys.readouterr()
        run_ = parse_cascade([example(tmp_path, world, frozen, base, **changes)]).recipe().open(ALONE).settings
        assert run_.control.params_of(run_.control.filter_class).resize_form == form
        assert (f'is {{"resize": 16, "resize_form": "square"}}, as {path} was' in capsys.readouterr().out) is (
            form == "square"
        )


def test_a_base_whose_text_a_clip_encodes(tmp_path, world, frozen):
    """Which CLIP it is, the base says; another is refused."""
    clip = make_classifier_file(tmp_path, noised=False)
    changes = [("model.text", {"enc_attn_dim": 0, "text_length": 12}), ("clip_text_model_name", clip)]
    changes += [("model.text_width", 16), ("model.pooled_width", 16)]
    base = make_base(tmp_path / "base", world, frozen, *changes)
    train_example(tmp_path / "run", world, frozen, base, updates=1)
    (tmp_path / "other").mkdir()
    other = make_classifier_file(tmp_path / "other", noised=False, classifier_width=32)
    with pytest.raises(InputError, match="clip_text_model_name is .*, but the run has"):
        train_example(tmp_path / "x", world, frozen, base, clip_text_model_name=other)


def test_only_what_concerns_training_may_differ_from_the_process_of_the_base(tmp_path, world, frozen, base):
    run_ = parse_cascade([example(tmp_path, world, frozen, base, offset_noise=0.1)]).recipe().open(ALONE).settings
    own = open_network(base, "stage_c").settings.diffusion
    assert run_.diffusion == replace(own, offset_noise=0.1, loss_weighting=("p2",)) and own.offset_noise == 0
    with pytest.raises(InputError, match="diffusion.log_snr_schedule is sqrt, but the base|log_snr_schedule is sqrt"):
        run_ = parse_cascade([example(tmp_path, world, frozen, base, diffusion={"log_snr_schedule": "sqrt"})])
        run_.recipe().open(ALONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"controlnet_blocks": None}, r"controlnet_blocks \(.*\) is required"),
        ({"controlnet_filter": None}, r"controlnet_filter \(.*\) is required"),
        ({"controlnet_bottleneck_mode": None}, "effnet, which starts from the weights of a semantic encoder efficient"),
        ({"model_version": "3.6B"}, r"widths is 2048,2048 \(model_version 3.6B\), but the base"),
        ({"model": {"cond_width": 32}}, "cond_width is 32, but the base"),
        ({"module_filters": [".attn"]}, "belongs to the training of a LoRA"),
        ({"base": {"identity": "0123456789abcdef"}}, "but the run was begun with 0123456789abcdef: give those"),
        ({"generator_checkpoint_path": "semantic"}, "holds a semantic, but a stage_c is required here"),
    ],
)
def test_bad_files_are_refused(tmp_path, world, frozen, base, changes, message):
    if "generator_checkpoint_path" in changes:
        changes = {"generator_checkpoint_path": frozen["effnet_checkpoint_path"]}
    with pytest.raises(InputError, match=message):
        parse_cascade([example(tmp_path, world, frozen, base, **changes)]).recipe().open(ALONE)
