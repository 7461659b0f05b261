"""ControlNets of both kinds of networks: no effect at the start, a frozen base, what they add and where."""

from dataclasses import replace

import latent_making
import pytest
import torch
from latent_making import conditioning, latents
from network_making import TEXT, TRANSFORMER, UNET, captions, make_generator, noisy, randomize, without_gradient
from refusing import refused
from released_making import stand_in_torchvision
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.models.adapters.controlnet import Controlled, UnetControlConfig, UnetControlNet
from diff_dalle.models.adapters.latent_controlnet import (
    BACKBONES,
    BackboneConfig,
    LatentControlConfig,
    LatentControlNet,
)
from diff_dalle.models.generator import GeneratorConfig, LowResConfig
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stages import STAGE_C_SIZES

LATENT = latent_making.C  # its residual blocks: 8 8 | 12 12 | 12 12 12 12 | 8 8 8
SMALL = LatentControlConfig((0, 3, 10), "large", BackboneConfig(large_width=8, large_blocks=1))
ENCODER = SemanticConfig(stride=8, encoder_width=4, encoder_blocks=1, previewer_width=8)


def make_pixel(**unet):
    """A base with all weights random, and its ControlNet as training starts it, of controls with 2 channels."""
    base = make_generator(**{"patch_size": 2, **unet}).eval().requires_grad_(False)
    torch.manual_seed(1)
    controlnet = UnetControlNet(UnetControlConfig(hint_channels=6), base.config, 2)
    controlnet.start_from(base)
    x, t = noisy()
    return base, controlnet, x, t, replace(captions(), control=torch.rand(3, 2, 16, 16))


def make_latent(config=SMALL):
    base = latent_making.make(LATENT).eval().requires_grad_(False)
    torch.manual_seed(1)
    controlnet = LatentControlNet(config, LATENT, 5)
    return base, controlnet, *latents(LATENT), replace(conditioning(LATENT), control=torch.rand(3, 5, 8, 12))


def make_transformer():
    return make_pixel(**TRANSFORMER)


MAKERS = {"pixel": make_pixel, "latent": make_latent, "transformer": make_transformer}
BOTH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def plain(cond: Conditioning) -> Conditioning:
    return replace(cond, control=None)


@BOTH
def test_an_untrained_one_leaves_the_base_bit_identical(make):
    base, controlnet, x, t, cond = make()
    steered = Controlled(base, controlnet)
    assert torch.equal(steered(x, t, cond), base(x, t, plain(cond)))
    randomize(controlnet)
    assert (steered(x, t, cond) - base(x, t, plain(cond))).abs().max() > 1e-3
    assert torch.equal(steered(x, t, plain(cond)), base(x, t, plain(cond)))


@BOTH
def test_the_base_gets_no_gradient_and_the_controlnet_does(make):
    """At the start only the layers that are 0 do, and after a step of these everything."""
    base, controlnet, x, t, cond = make()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    Controlled(base, controlnet)(x, t, cond).square().mean().backward()
    zero = {name for name, p in controlnet.named_parameters() if p.grad is not None and p.grad.any()}
    assert zero and all(not dict(controlnet.named_parameters())[name].any() for name in zero)
    controlnet.zero_grad()
    randomize(controlnet)
    steered = Controlled(base, controlnet)
    steered(x, t, cond).square().mean().backward()
    assert not without_gradient(controlnet)
    assert all(p.grad is None for p in base.parameters())
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())


@pytest.mark.parametrize(
    "make",
    [make_pixel, lambda: make_latent(replace(SMALL, controlnet_blocks=(8, 10))), make_transformer],
    ids=MAKERS,
)
def test_less_is_kept_for_the_backward_pass_than_in_training_the_base(make):
    """Of the base's part before the first control nothing, since nothing there has a gradient."""
    base, controlnet, x, t, cond = make()

    def kept(run) -> int:
        sizes = {}

        def pack(value):
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            out = run()
        weights = {p.untyped_storage().data_ptr() for p in [*base.parameters(), *controlnet.parameters()]}
        assert out.grad_fn is not None
        return sum(size for pointer, size in sizes.items() if pointer not in weights)

    hint = controlnet.encode(cond.control).detach()
    encoded = base.encode_text(plain(cond))
    with torch.no_grad():
        residuals = controlnet(hint, x, t, encoded)
    given = [None if each is None else each.requires_grad_() for each in residuals]
    frozen = kept(lambda: base(x, t, encoded, control=given))
    base.requires_grad_(True)
    assert frozen < 0.8 * kept(lambda: base(x, t, encoded, control=given))


@BOTH
def test_the_hint_is_made_once_and_stands_for_the_control(make):
    base, controlnet, x, t, cond = make()
    randomize(controlnet)
    steered = Controlled(base, controlnet)
    encoded = steered.encode_text(cond)
    assert encoded.control is None and steered.encode_text(encoded) is encoded
    controlnet.encode = None  # not called again
    once = steered(x, t, encoded)
    del controlnet.encode
    assert_close(once, steered(x, t, cond))
    assert torch.equal(steered(x, t, encoded.without_control()), base(x, t, plain(cond)))
    assert torch.equal(steered(x, t, cond.without_control()), base(x, t, plain(cond)))


@BOTH
def test_the_scale_multiplies_what_is_added(make):
    base, controlnet, x, t, cond = make()
    randomize(controlnet)
    encoded = Controlled(base, controlnet).encode_text(cond)
    control = controlnet(encoded.extra["control_hint"], x, t, encoded)
    halved = [None if each is None else each / 2 for each in control]
    assert_close(Controlled(base, controlnet, 0.5)(x, t, cond), base(x, t, encoded, control=halved))
    assert torch.equal(Controlled(base, controlnet, 0.0)(x, t, cond), base(x, t, plain(cond)))


@BOTH
def test_a_sample_is_the_same_alone(make):
    base, controlnet, x, t, cond = make()
    steered = Controlled(base, randomize(controlnet)).eval()
    whole = steered(x, t, cond)
    for i in range(3):
        assert_close(steered(x[i : i + 1], t[i : i + 1], cond.select([i])), whole[i : i + 1])


# ---------------------------------------------------------------------------------------------------------------- U-Net


def test_each_feature_map_gets_its_own_residual():
    """Skip connections from the first on, then the middle block; each one's change is where it is added."""
    base, _, x, t, cond = make_pixel()
    encoded = base.encode_text(plain(cond))
    middle, skips, _ = base.unet.encoder(x, t, encoded)
    maps, seen = [*skips, middle], []
    handles = [
        block.register_forward_pre_hook(lambda module, inputs: seen.append((inputs[0], inputs[-1])))
        for block in base.unet.output_blocks
    ]
    control = [torch.full_like(each, 1.0 + i) for i, each in enumerate(maps)]
    base(x, t, encoded, control=control)
    [handle.remove() for handle in handles]
    assert_close(seen[0][0], middle + len(maps))
    for i, (_, skip) in enumerate(seen):
        assert_close(skip, skips[-1 - i] + len(skips) - i)
    assert_close(base(x, t, encoded, control=[None] * len(maps)), base(x, t, encoded))


def test_the_hint_is_added_after_the_first_layer():
    base, controlnet, x, t, cond = make_pixel()
    encoded = base.encode_text(plain(cond))
    hint = torch.randn(3, 8, 8, 8)
    first = controlnet.encoder.input_blocks[0]
    _, plain_skips, _ = controlnet.encoder(x, t, encoded)
    _, skips, _ = controlnet.encoder(x, t, encoded, hint)
    assert_close(skips[0], plain_skips[0] + hint)
    assert first is controlnet.encoder.input_blocks[0] and not torch.equal(skips[1], plain_skips[1])


def test_the_copy_starts_as_the_base_and_ends_elsewhere():
    base, controlnet, *_ = make_pixel(num_classes=2)
    copied, own = controlnet.encoder.state_dict(), base.unet.encoder.state_dict()
    assert copied.keys() == own.keys() and all(torch.equal(copied[name], own[name]) for name in own)
    assert not {p.data_ptr() for p in base.parameters()} & {p.data_ptr() for p in controlnet.parameters()}
    others = [name for name, _ in controlnet.named_parameters() if not name.startswith("encoder.")]
    assert all(name.startswith(("hint.", "zero_convs.")) for name in others)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ((3, 2, 8, 16), "the control has 16×8 pixels, but the images have 16×16: give one of the same size"),
        ((3, 7, 16, 16), r"the control has the shape \(3, 7, 16, 16\), but the ControlNet takes"),
        ((3, 2, 15, 16), "the control has 16×15 pixels, but must have those of the images, multiples of 2"),
    ],
)
def test_a_control_of_another_size_is_refused(control, message):
    base, controlnet, x, t, cond = make_pixel()
    with refused(message):
        Controlled(base, controlnet)(x, t, replace(cond, control=torch.rand(control)))


def test_control_tensors_that_do_not_fit_are_refused():
    base, _, x, t, cond = make_pixel()
    with refused("there are 2 control tensors, but the network takes 5"):
        base(x, t, plain(cond), control=[None, None])
    with refused(r"a control tensor has the shape \(3, 1, 8, 8\), but is added to one of"):
        base(x, t, plain(cond), control=[torch.zeros(3, 1, 8, 8), *[None] * 4])


def test_an_upsampler_has_no_controlnet():
    config = GeneratorConfig(UNET, TEXT, LowResConfig(small_size=8))
    with refused(r"the base is an upsampler \(small_size\)"):
        UnetControlNet(UnetControlConfig(), config, 1)
    with refused(r"the base is an inpainting network \(inpaint\)"):
        UnetControlNet(UnetControlConfig(), GeneratorConfig(UNET, TEXT, inpaint=True), 1)
    with refused("hint_channels is 0"):
        UnetControlConfig(hint_channels=0)
    with refused("control_channels is 0"):
        UnetControlNet(UnetControlConfig(), GeneratorConfig(UNET, TEXT), 0)


# ---------------------------------------------------------------------------------------------------------- transformer


def test_each_copied_block_steers_the_same_one_of_the_base():
    """Of the first half of the blocks. What it makes is added to the image tokens after each; text is not changed."""
    base, controlnet, x, t, cond = make_transformer()
    own, copied = base.denoiser.encoder, controlnet.encoder
    assert (len(own.blocks), len(copied.blocks)) == (3, 2)
    theirs = own.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in copied.state_dict().items())
    encoded, seen = base.encode_text(plain(cond)), []
    handles = [block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for block in own.blocks]
    base(x, t, encoded)
    base(x, t, encoded, control=[None, torch.ones(3, 16, 4, 4)])
    [handle.remove() for handle in handles]
    assert torch.equal(seen[1], seen[4]) and torch.equal(seen[2][:, 16:], seen[5][:, 16:])
    assert_close(seen[5][:, :16], seen[2][:, :16] + 1)
    with refused("there are 3 control tensors, but the network takes 2"):
        base(x, t, encoded, control=[None] * 3)
    with refused(r"a control tensor has the shape \(3, 1, 4, 4\), but is added to one of"):
        base(x, t, encoded, control=[None, torch.zeros(3, 1, 4, 4)])


# -------------------------------------------------------------------------------------------------------------- latents


def test_widths_are_those_of_the_blocks_that_are_steered():
    base, controlnet, x, t, cond = make_latent()
    assert LATENT.residual_widths == [8, 8, 12, 12, 12, 12, 12, 12, 8, 8, 8]
    found = controlnet(controlnet.encode(cond.control), x, t, cond)
    assert [None if each is None else each.shape[1] for each in found] == [8, None, None, 12, *[None] * 6, 8]
    assert base(x, t, plain(cond), control=found).shape == x.shape


def test_every_block_can_be_steered():
    base, _, x, t, cond = make_latent()
    for block in range(len(LATENT.residual_widths)):
        steered = Controlled(base, randomize(make_latent(replace(SMALL, controlnet_blocks=(block,)))[1]))
        assert not torch.equal(steered(x, t, cond), base(x, t, plain(cond)))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((), "controlnet_blocks is empty"),
        ((0, 11), "controlnet_blocks has 11, but the base has 11 residual blocks, numbered from 0 to 10"),
    ],
)
def test_blocks_that_the_base_does_not_have_are_refused(blocks, message):
    with refused(message):
        LatentControlNet(replace(SMALL, controlnet_blocks=blocks), LATENT, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"controlnet_blocks": (1, 1)}, "controlnet_blocks is 1,1, but must be different numbers from 0 on"),
        ({"controlnet_blocks": (-1,)}, "controlnet_blocks is -1, but must be at least 0"),
        ({"controlnet_bottleneck_mode": "efnet"}, "mode is 'efnet', but .*; did you mean effnet"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with refused(message):
        replace(SMALL, **change)
    for bad in ({"large_width": 6}, {"large_width": 0}, {"large_blocks": -1}):
        with refused(next(iter(bad))):
            BackboneConfig(**bad)


@pytest.mark.parametrize(
    ("version", "blocks", "mode", "channels", "millions"),
    [
        ("3.6B", (0, 4, 8, 12, 51, 55, 59, 63), "large", 16, 203.5),
        ("3.6B", tuple(range(64)), "simple", 512, 102.8),
        ("1B", (0, 31), "simple", 3, None),
    ],
)
def test_published_sizes(version, blocks, mode, channels, millions):
    """Of the released trainings; with the smaller base the projections are as wide as that is."""
    with torch.device("meta"):
        controlnet = LatentControlNet(LatentControlConfig(blocks, mode), STAGE_C_SIZES[version], channels)
    if millions:
        assert round(sum(p.numel() for p in controlnet.parameters()) / 1e6, 1) == millions
    else:
        assert {module[2].out_channels for module in controlnet.projections.values()} == {1536}


# ------------------------------------------------------------------------------------------------------------ backbones


@pytest.fixture
def torchvision(monkeypatch):
    stand_in_torchvision(monkeypatch, strided=True)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", BACKBONES)
def test_backbones(name, channels):
    config = BackboneConfig(large_width=8, large_blocks=2, semantic=ENCODER)
    torch.manual_seed(0)
    backbone = BACKBONES[name](config, channels)
    out = backbone(torch.rand(2, channels, 32, 64))
    stride = {"effnet": 32, "semantic": 8}.get(name, 1)
    assert out.shape == (2, backbone.channels, 32 // stride, 64 // stride)
    assert backbone.channels == {"effnet": 1280, "semantic": 8, "large": 10, "simple": channels}[name]


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", ["effnet", "semantic"])
def test_encoders_of_pictures_start_from_the_weights_of_the_semantic_encoder(name, channels):
    """With more channels than colors the further ones have no effect at the start; padding and stride stay."""
    torch.manual_seed(0)
    config = ENCODER if name == "semantic" else SemanticConfig(backbone="efficientnet_v2_s", previewer_width=8)
    encoder = randomize(SemanticAutoencoder(config)).eval()
    backbone = BACKBONES[name](BackboneConfig(semantic=ENCODER), channels).eval()
    backbone.start_from(encoder)
    control = torch.rand(2, channels, 32, 32)
    colors = torch.zeros(2, 3, 32, 32)
    colors[:, : min(channels, 3)] = control[:, :3]
    if name == "semantic":
        if channels >= 3:
            assert_close(backbone(control), encoder.backbone(2 * colors - 1), atol=1e-4, rtol=1e-4)
    else:
        assert_close(backbone(control), encoder.backbone.features(colors), atol=1e-4, rtol=1e-4)
    first = backbone.network.get_submodule(backbone.first)
    assert first.weight.shape[1] == channels
    if channels == 4:
        assert not first.weight[:, 3].any() and first.weight[:, :3].any()


@pytest.mark.usefixtures("torchvision")
def test_efficientnet_trains_in_evaluation_mode():
    backbone = BACKBONES["effnet"](BackboneConfig(), 1).train()
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    backbone(torch.rand(2, 1, 32, 32)).sum().backward()
    assert not any(module.training for module in backbone.network.modules())
    assert all(torch.equal(before[name], value) for name, value in backbone.named_buffers())
    assert all(p.grad is not None for p in backbone.parameters())
