"""Training a ControlNet of a generator by the script."""

import numpy as np
import pytest
import torch
from checkpoint_making import make_file
from control_making import flags_of, make_pictures, train_controlnet
from PIL import Image
from script_running import losses

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands.info import describe_file
from diff_dalle.commands.training_kinds import parse_controlnet
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.contract import weights_digest


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, data):
    logdir = tmp_path_factory.mktemp("trained")
    train_controlnet(base, data, logdir)
    return logdir


def test_settings_are_read_from_the_base(trained, base):
    """What a checkpoint says: the base's network and weights, the filter, and no tokenizer."""
    saved = open_network(str(trained / "model000002.pt"), "controlnet")
    settings, own = saved.settings, open_network(base, "generator").settings
    assert settings.model == own.model and saved.tokenizer is None
    assert settings.base.identity == weights_digest(load_file(base)["state"]) and settings.base.image_size == 16
    assert settings.control.control_channels == 1 and settings.control.controlnet_filter == "canny"
    network = saved.load(torch.device("cpu"))
    assert not any(p.requires_grad for p in network.parameters()) and network.hint[0].out_channels == 8
    text = describe_file(str(trained / "ema_0.5_000002.pt"))
    assert f"steers the base {settings.base.identity} by controls of 1 channels, which the filter canny" in text
    assert "GFLOPs for a forward pass over one image of 16×16 pixels" in text
    assert not any("base" in name for name in load_file(str(trained / "model000002.pt"))["state"])


def test_the_initial_weights_are_those_of_the_base(tmp_path, base, data):
    """Of the encoder; what the ControlNet adds is 0."""
    network = parse_controlnet(flags_of(base, data, tmp_path)).recipe().open(ALONE).network()
    expected = load_file(base)["state"]
    for name, value in network.encoder.state_dict().items():
        assert torch.equal(value, expected[f"unet.encoder.{name}"]), name
    assert not any(conv.weight.any() for conv in network.zero_convs)


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path, base, data):
    """Losses and gradients; with a larger learning rate the first updates, of AdamW, would depend on rounding."""
    settings = {"iterations": 2, "lr": 1e-4}
    train_controlnet(base, data, tmp_path / "one", **settings)
    train_controlnet(base, data, tmp_path / "two", **settings, batch_size=2, _ranks=2)
    for name in ("loss", "grad_norm"):
        one, two = (losses(tmp_path / folder, name) for folder in ("one", "two"))
        assert one.keys() == {1, 2} and two == pytest.approx(one, rel=1e-5)


def test_ready_made_controls_come_from_the_shards(tmp_path, base, data):
    """And only with that filter: the shards need have none otherwise."""
    params = '{"member": "cond.png", "channels": 1}'
    train_controlnet(base, data, tmp_path, controlnet_filter="ready", controlnet_filter_params=params)
    assert open_network(str(tmp_path / "model000002.pt"), "controlnet").settings.control.control_channels == 1
    own = {"controlnet_filter": "ready", "controlnet_filter_params": '{"member": "depth.png"}'}
    missing = train_controlnet(base, data, tmp_path / "x", **own, _ok=False)
    assert missing.returncode == 2 and "holds no controls (no .depth.png members" in missing.stderr


def test_previews_show_control_sample_and_original(tmp_path, base, data):
    own = {"iterations": 1, "sample_interval": 1, "preview_samples": 2, "preview_steps": 2, "guidance_scale": 1}
    train_controlnet(base, data, tmp_path, **own, controlnet_filter="ready", controlnet_filter_params="{}")
    (path,) = (tmp_path / "samples").glob("*.png")
    grid = np.asarray(Image.open(path).convert("RGB")).astype(int)
    controls, _, originals, *_ = (grid[4:100, left : left + 96] for left in range(4, grid.shape[1], 100))
    assert np.abs(controls + originals - 255).max() <= 1  # its negative


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_path": ""}, "model_path"),
        ({"controlnet_filter": "semantic_sr", "controlnet_filter_params": "{}"}, "requires a semantic encoder"),
        ({"hint_channels": 0}, "hint_channels is 0"),
        ({"set": "model.unet.num_channels=32"}, "num_channels is 32, but the base"),
        ({"set": "diffusion.loss_type=l1"}, "loss_type is l1, but the base"),
        ({"set": "base.identity=0123456789abcdef"}, "but the run was begun with 0123456789abcdef: give those"),
    ],
)
def test_bad_input_is_told_in_one_sentence(tmp_path, base, data, changed, message):
    """Beside that of which ``record`` holds the messages."""
    result = train_controlnet(base, data, tmp_path, **changed, _ok=False)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.glob("*.pt"))


def test_another_base_is_refused_when_a_run_goes_on(tmp_path, trained, base, data):
    other = str(tmp_path / "other.pt")
    content = torch.load(base, weights_only=True)
    name = next(iter(content["state"]))
    content["state"][name] = content["state"][name] + 1
    torch.save(content, other)
    result = train_controlnet(other, data, trained, iterations=4, _ok=False)
    assert result.returncode == 2 and "holds a run with other settings: base.identity (" in result.stderr


def test_the_resolved_settings_can_be_given_again(tmp_path, base, data):
    """A dump of what has been settled repeats the base's settings, which is no contradiction."""
    run = parse_controlnet(flags_of(base, data, tmp_path)).recipe().open(ALONE).settings
    again = run.recipe().open(ALONE).settings
    assert again == run and again.model.unet.num_channels == 16
    with pytest.raises(InputError, match="prediction is v, but the base"):
        parse_controlnet([*flags_of(base, data, tmp_path), "--set", "diffusion.prediction=v"]).recipe().open(ALONE)
