"""What every kind of network promises: settings that act, samples by themselves, recomputation, half precision."""

from dataclasses import fields
from functools import partial

import pytest
import torch
from latent_making import B, C, own_text
from network_kinds import COMBINED, KINDS, decoder, generator, stage, upsampler
from network_making import TRANSFORMER, relative, without_gradient
from operation_counting import parameter_conversions
from torch import nn
from torch.testing import assert_close

from diff_dalle.models.precision import for_inference

# Further networks, by the kind that they are of.
MORE = {
    "joint": ("U-Net", partial(generator, text_attention="joint", num_classes=5)),
    "all of the U-Net": (
        "U-Net",
        partial(generator, resblock_updown=True, patch_size=2, text_attention="joint", output_conv=4),
    ),
    "upsampler": ("U-Net", partial(upsampler, resblock_updown=True)),
    "upsampler, transformer": ("transformer", partial(upsampler, **TRANSFORMER)),
    **{f"decoder, {name}": ("decoder", partial(decoder, **settings)) for name, settings in COMBINED.items()},
    **{
        f"decoder, {name}, upsampler": ("decoder", partial(decoder, True, True, **settings))
        for name, settings in COMBINED.items()
    },
    "decoder, image_embed_dim = cond_dim": ("decoder", partial(decoder, image_embed_dim=4, num_image_tokens=3)),
    "stage B, own text": ("stage B", partial(stage, own_text(B))),
    "stage C, own text": ("stage C", partial(stage, own_text(C))),
}
MAKERS = {name: (name, kind.make) for name, kind in KINDS.items()} | MORE
EACH = pytest.mark.parametrize("name", MAKERS)
# Every second one of a decoder with its other inputs and outputs.
UPSAMPLER = {"low_res": True, "learned_variance": True}
SETTINGS = [
    (kind, name, UPSAMPLER if kind == "decoder" and i % 2 else {})
    for kind, each in KINDS.items()
    for i, name in enumerate(each.other)
    if name != each.checkpointing
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_another_value_to_try(kind):
    """``test_architecture`` relies on it: the classifier reads its settings by computed names."""
    found, known = KINDS[kind], {field.name for field in fields(KINDS[kind].config)}
    assert {*found.other, *found.elsewhere} == known and not found.other.keys() & {*found.elsewhere}
    assert all(getattr(found.config, name) != value for name, value in found.other.items())


@pytest.mark.parametrize(("kind", "name", "inputs"), SETTINGS)
def test_every_setting_changes_the_network_and_it_trains(kind, name, inputs):
    """Its parameters, or the output of the same parameters; each of these has a gradient, as DDP requires."""
    found = KINDS[kind]
    changed = {each: found.other[each] for each in (name, found.together.get(name, name))}
    base, plain = found.make(**{**changed, name: getattr(found.config, name)}, **inputs)
    network, call = found.make(**changed, **inputs)
    shapes = [{each: value.shape for each, value in one.state_dict().items()} for one in (base, network)]
    if shapes[0] == shapes[1]:
        network.load_state_dict(dict(base.named_parameters()), strict=False)
        assert relative(call(), plain()) > 1e-3
    out = call()
    assert out.dtype == torch.float32 and out.isfinite().all()
    out.square().mean().backward()
    assert [each for each in without_gradient(network) if not each.startswith(found.untrained)] == []


@EACH
def test_a_sample_is_alone_what_it_is_in_a_batch(name):
    kind, make = MAKERS[name]
    _, call = make()
    whole, tolerance = call(), {"atol": 1e-5, "rtol": 1e-4} if kind == "decoder" else {}
    for one in ([0], [2]):
        assert_close(call(one), whole[one], **tolerance)


@pytest.mark.parametrize(
    ("name", "keyed"),
    [
        (name, keyed)
        for name, (kind, _) in MAKERS.items()
        for keyed in (True, False)
        if KINDS[kind].checkpointing and (keyed or KINDS[kind].dropout)
    ],
)
def test_activation_checkpointing_saves_activations_and_changes_no_bit(name, keyed):
    """Of output and gradients, with dropout by keys or by torch's generator; every parameter has a gradient."""
    kind, make = MAKERS[name]
    found, results, kept = KINDS[kind], [], []
    for on in (False, True):
        network, call = make(**{**found.dropout, found.checkpointing: on})
        kept.append(0)

        def keep(value):
            kept[-1] += value.numel()
            return value

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            out = call() if keyed else call(keyed=False)
        out.square().mean().backward()
        assert [each for each in without_gradient(network) if not each.startswith(found.untrained)] == []
        results.append([out, *(p.grad for p in network.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < (0.9 if name == "semantic" else 0.7) * kept[0], kept  # whose previewer keeps its own


HALF = pytest.mark.parametrize("name", [name for name in MAKERS if name != "discriminator"])


@HALF
def test_half_precision_is_close_and_weights_can_be_converted_once(name):
    """Outputs are fp32. With weights converted in advance autocast gives the same, and nothing else was converted."""
    kind, make = MAKERS[name]
    network, call = make()
    network.eval().requires_grad_(False)
    exact, results, conversions = call(), [], []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for precision in ("fp32", "bf16"):
            assert for_inference(network, precision) is network
            conversions.append(parameter_conversions(network, lambda: results.append(call())))
    assert results[0].dtype == exact.dtype == torch.float32
    assert 1e-6 < relative(results[0], exact) < (0.03 if kind == "U-Net" else 0.05)
    assert torch.equal(results[1], results[0])
    converted = sum(p.dtype == torch.bfloat16 for p in network.parameters())
    if kind.startswith("stage "):  # which may use a weight several times
        assert conversions[0] >= converted > 0 and conversions[1] <= conversions[0] - converted
    else:
        assert conversions[0] - conversions[1] == converted > 0
    if kind in ("U-Net", "transformer", "classifier"):
        assert conversions[0] > 40 and conversions[1] <= 1  # a classifier's position embeddings


@HALF
def test_norms_embeddings_and_full_precision_layers_are_not_converted(name):
    network, _ = MAKERS[name][1]()
    full = {
        f"{path}.{layer}." if path else f"{layer}."
        for path, module in network.named_modules()
        for layer in getattr(module, "full_precision", ())
    }
    for_inference(network, "fp16")
    for path, module in network.named_modules():
        half = isinstance(module, (nn.Linear, nn.Conv2d)) and not f"{path}.".startswith(tuple(full))
        assert all((p.dtype == torch.float16) == half for p in module.parameters(recurse=False)), path
