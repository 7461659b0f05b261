"""Weights under the released names, at small width and, on the meta device, at the released sizes."""

import pytest
import torch
from latent_making import B, C, own_text
from network_making import VOCABULARY
from refusing import refused
from released_making import (
    BACKBONE,
    ENCODER,
    file_of,
    layer,
    previewer,
    stage_a,
    stage_b,
    stage_c,
    stand_in_torchvision,
)

from diff_dalle.models.latent.released import LAYOUTS
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stage_a import STAGE_A_SIZES, StageA, StageAConfig
from diff_dalle.models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageB, StageC

TINY_A = StageAConfig(levels=3, width=12, bottleneck_blocks=2, latent_channels=3, codebook_size=20)


@pytest.fixture
def _torchvision(monkeypatch):
    stand_in_torchvision(monkeypatch)


def semantic():
    torch.manual_seed(0)
    return SemanticAutoencoder(SemanticConfig(backbone="efficientnet_v2_s", semantic_channels=5, previewer_width=8))


# ---------------------------------------------------------------------------------------------------------------- names


UNET_PAIRS = {
    "in_conv.weight": "embedding.1.weight",
    "out_conv.bias": "clf.1.bias",
    "down_blocks.0.0.depthwise.bias": "down_blocks.0.0.depthwise.bias",
    "down_blocks.0.0.mlp.linear_in.weight": "down_blocks.0.0.channelwise.0.weight",
    "down_blocks.0.2.mlp.linear_out.bias": "down_blocks.0.2.channelwise.4.bias",
    "up_blocks.1.2.mlp.response_norm.gamma": "up_blocks.1.2.channelwise.2.gamma",
    "up_blocks.1.2.mlp.response_norm.beta": "up_blocks.1.2.channelwise.2.beta",
    "down_blocks.1.4.mappers.0.weight": "down_blocks.1.4.mapper.weight",
    "down_blocks.1.4.mappers.1.bias": "down_blocks.1.4.mapper_sca.bias",
    "down_blocks.1.5.attn.in_proj.weight": "down_blocks.1.5.attention.attn.in_proj_weight",
    "up_blocks.0.2.attn.in_proj.bias": "up_blocks.0.2.attention.attn.in_proj_bias",
    "up_blocks.0.5.attn.out_proj.weight": "up_blocks.0.5.attention.attn.out_proj.weight",
    "up_blocks.0.5.kv_mapper.weight": "up_blocks.0.5.kv_mapper.1.weight",
    "down_repeats.0.0.bias": "down_repeat_mappers.0.0.bias",
    "up_repeats.0.0.weight": "up_repeat_mappers.0.0.weight",
    "up_repeats.1.1.weight": "up_repeat_mappers.1.1.weight",
}
PAIRS = {
    "stage_b": UNET_PAIRS | {
        "condition_tokens.pooled.weight": "clip_mapper.weight",
        "semantic_mapper.layer_in.bias": "effnet_mapper.0.bias",
        "semantic_mapper.layer_out.weight": "effnet_mapper.2.weight",
        "pixel_mapper.layer_in.bias": "pixels_mapper.0.bias",
        "pixel_mapper.layer_out.weight": "pixels_mapper.2.weight",
        "down_transitions.0.conv.weight": "down_downscalers.1.1.weight",
        "up_transitions.0.conv.bias": "up_upscalers.0.1.bias",
    },
    "stage_c": UNET_PAIRS | {
        "condition_tokens.text.weight": "clip_txt_mapper.weight",
        "condition_tokens.pooled.bias": "clip_txt_pooled_mapper.bias",
        "condition_tokens.image.bias": "clip_img_mapper.bias",
        "down_blocks.1.4.mappers.2.weight": "down_blocks.1.4.mapper_crp.weight",
        "down_transitions.0.conv.weight": "down_downscalers.1.1.blocks.0.weight",
        "up_transitions.0.conv.bias": "up_upscalers.0.1.blocks.1.bias",
    },
    "stage_a": {
        "in_conv.bias": "in_block.1.bias",
        "down_blocks.0.gates": "down_blocks.0.gammas",
        "down_blocks.1.weight": "down_blocks.1.weight",
        "down_blocks.2.depthwise.weight": "down_blocks.2.depthwise.1.weight",
        "down_blocks.4.linear_in.bias": "down_blocks.4.channelwise.0.bias",
        "down_blocks.4.linear_out.weight": "down_blocks.4.channelwise.2.weight",
        "to_latents.weight": "down_blocks.5.0.weight",
        "norm.running_var": "down_blocks.5.1.running_var",
        "norm.bias": "down_blocks.5.1.bias",
        "quantizer.codebook.weight": "vquantizer.codebook.weight",
        "from_latents.bias": "up_blocks.0.0.bias",
        "up_blocks.0.gates": "up_blocks.1.gammas",
        "up_blocks.1.gates": "up_blocks.2.gammas",
        "up_blocks.2.bias": "up_blocks.3.bias",
        "up_blocks.5.gates": "up_blocks.6.gammas",
        "out_conv.weight": "out_block.0.weight",
    },
}  # fmt: skip
MAKE = {
    "stage_b": (lambda: StageB(B), stage_b(B), []),
    "stage_c": (lambda: StageC(C), stage_c(C), []),
    "stage_a": (lambda: StageA(TINY_A), stage_a(TINY_A), ["scale_factor", "quantizer.usage"]),
}


def read(kind, network, file, layout=0):
    return LAYOUTS[kind][layout].read(network, file)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_every_tensor_finds_its_place(name, nested):
    build, shapes, kept = MAKE[name]
    network, file = build(), file_of(shapes)
    found = read(name, network, {"state_dict": file} if nested else file)
    assert found.unused == [] and sorted(found.kept) == sorted(kept) and len(found.state) == len(file)
    own = network.state_dict()
    assert all(value.dtype == own[each].dtype for each, value in found.state.items())
    missing = network.load_state_dict(found.state, strict=False).missing_keys
    assert sorted(missing) == sorted(kept)
    for ours, theirs in PAIRS[name].items():
        value = network.state_dict()[ours]
        assert value.dtype == torch.float32 and torch.equal(value, file[theirs].float().view(value.shape)), ours


def test_stage_a_has_its_batches_counted():
    network = StageA(TINY_A)
    network.load_state_dict(read("stage_a", network, file_of(stage_a(TINY_A))).state, strict=False)
    assert network.norm.num_batches_tracked == 7


@pytest.mark.usefixtures("_torchvision")
def test_semantic_encoder_and_previewer_come_from_two_files():
    network, encoder, preview = semantic(), file_of(ENCODER), file_of(previewer(5, 8), seed=1)
    parts = [
        read("semantic", network, encoder),
        read("semantic", network, preview, 1),
    ]
    assert all(part.unused == [] for part in parts)
    assert len(parts[0].state) == len(encoder) and len(parts[1].state) == len(preview)
    state = parts[0].state | parts[1].state
    missing = network.load_state_dict(state, strict=False).missing_keys
    assert missing == ["latent_mean", "latent_std", "backbone.mean", "backbone.std"]
    pairs = {
        "backbone.features.0.0.weight": "backbone.0.0.weight",
        "backbone.features.0.1.running_mean": "backbone.0.1.running_mean",
        "mapper.weight": "mapper.0.weight",
        "norm.running_var": "mapper.1.running_var",
        "previewer.convs.1.weight": "blocks.3.weight",
        "previewer.norms.0.bias": "blocks.2.bias",
        "previewer.convs.7.weight": "blocks.21.weight",
        "previewer.norms.7.running_var": "blocks.23.running_var",
        "previewer.out_conv.bias": "blocks.24.bias",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(network.state_dict()[ours], (encoder | preview)[theirs].float()), ours


@pytest.mark.usefixtures("_torchvision")
def test_weights_of_torchvision_itself():
    """The projection and the previewer are still to be trained."""
    network = semantic()
    file = file_of({f"features.{name}": shape for name, shape in BACKBONE.items()} | layer("classifier.1", 3, 1280))
    found = read("semantic", network, file, 2)
    assert found.unused == ["classifier.1.weight", "classifier.1.bias"]
    own = {"mapper", "norm", "previewer", "latent_mean", "latent_std", "backbone"}
    assert {name.split(".")[0] for name in found.kept} == own
    network.load_state_dict(found.state, strict=False)
    weight = network.backbone.features[0][0].weight
    assert torch.equal(weight, file["features.0.0.weight"].float())


@pytest.mark.parametrize(
    ("stage", "config", "shapes", "kind", "parameters"),
    [
        (StageC, STAGE_C_SIZES["3.6B"], stage_c, "stage_c", 3_589_103_632),
        (StageC, STAGE_C_SIZES["1B"], stage_c, "stage_c", 1_030_785_040),
        (StageB, STAGE_B_SIZES["3B"], stage_b, "stage_b", 1_562_941_136),
        (StageB, STAGE_B_SIZES["700M"], stage_b, "stage_b", 699_471_248),
        (StageA, STAGE_A_SIZES["released"], stage_a, "stage_a", 18_406_894),
    ],
    ids=["C 3.6B", "C 1B", "B 3B", "B 700M", "A"],
)
def test_the_released_sizes(stage, config, shapes, kind, parameters):
    """Names and shapes agree at full width."""
    with torch.device("meta"):
        network = stage(config)
        file = {name: torch.empty(shape) for name, shape in shapes(config).items()}
    buffers = ("running", "tracked")
    assert sum(v.numel() for name, v in file.items() if not any(each in name for each in buffers)) == parameters
    assert read(kind, network, file).unused == []


# ----------------------------------------------------------------------------------------------------------- mismatches


def test_what_is_left_is_reported_and_what_is_own_is_kept():
    """A text encoder of our own, and a path that this network does not have."""
    config = own_text(C)
    network = StageC(config, VOCABULARY)
    found = read("stage_c", network, file_of(stage_c(config) | {"controlnet.x": (3,)}))
    assert found.unused == ["controlnet.x"]
    assert set(found.kept) == {name for name in network.state_dict() if name.startswith("text_encoder.")}
    assert network.load_state_dict(found.state, strict=False).missing_keys == found.kept


def test_other_networks_are_refused():
    shapes = stage_c(C)
    with refused(r"clip_img_mapper.weight has the shape \[20, 6\] in .* is \[20, 9\]"):
        read("stage_c", StageC(type(C)(**{**vars(C), "image_width": 9})), file_of(shapes))
    short = {name: shape for name, shape in shapes.items() if not name.startswith("clf.")}
    with refused(r"lacks 2 tensors of the network \(clf.1.weight, clf.1.bias\)"):
        read("stage_c", StageC(C), file_of(short))
    with refused(r"lacks \d+ tensors of the network \(.*, …\)"):
        read("stage_b", StageB(B), file_of(stage_a(TINY_A)))


def test_nothing_is_changed_by_converting():
    network, file = StageC(C), file_of(stage_c(C), torch.float32)
    names, before = list(file), {name: value.clone() for name, value in network.state_dict().items()}
    read("stage_c", network, file)
    assert list(file) == names
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
