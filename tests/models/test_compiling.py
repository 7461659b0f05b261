"""Blocks are captured as one graph each, which stays the same from step to step.

The graphs run uncompiled here ("eager"): capturing is what can break.
"""

from dataclasses import replace

import pytest
import torch
from checkpoint_making import make_run
from clip_making import CONFIG, DROPOUT
from latent_making import B, C, conditioning, latents, own_text
from latent_making import make as make_latent
from marks import slow
from network_making import TEXT, TRANSFORMER, UNET, VOCABULARY, captions, noisy, randomize
from torch import nn

from diff_dalle.distributed.world import ALONE
from diff_dalle.models import kernels
from diff_dalle.models.adapters.lora import Adapted
from diff_dalle.models.dropout import Dropout, number_dropouts
from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig
from diff_dalle.models.noised_clip import NoisedClip
from diff_dalle.models.units import compile_training, is_compiled
from diff_dalle.recipes import recipe

SMALL = replace(UNET, image_size=8, attention_resolutions=(4,), dropout=0.2)
SHORT = replace(TEXT, enc_depth=1, dropout_text=0.1)


class Graphs:
    """A backend that counts the graphs and runs them as they are."""

    def __init__(self):
        self.count = 0
        torch._dynamo.reset()

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def checkpointed():
    torch.manual_seed(0)
    unet = replace(SMALL, use_checkpoint=True, text_attention="joint", resblock_updown=True)
    network, (x, t) = Generator(GeneratorConfig(unet, SHORT), VOCABULARY), noisy(size=(8, 8))
    return network, lambda keys: network(x, t, replace(captions(), dropout_keys=keys))


def transformer():
    torch.manual_seed(0)
    unet = replace(SMALL, **TRANSFORMER, use_checkpoint=True)
    network, (x, t) = Generator(GeneratorConfig(unet, SHORT), VOCABULARY), noisy(size=(8, 8))
    return network, lambda keys: network(x, t, replace(captions(), dropout_keys=keys))


def routed():
    torch.manual_seed(0)
    unet = replace(SMALL, **{**TRANSFORMER, "patch_size": 2, "depth": 5, "route_share": 0.5, "route_blocks": (2, 4)})
    network, (x, t) = Generator(GeneratorConfig(unet, SHORT), VOCABULARY), noisy(size=(8, 8))
    return network, lambda keys: network(x, t, replace(captions(), dropout_keys=keys, routing_keys=keys))


def upsampler():
    torch.manual_seed(0)
    unet = replace(SMALL, num_classes=3)
    network = Generator(GeneratorConfig(unet, SHORT, LowResConfig(4, True)), VOCABULARY, learned_variance=True)
    (x, t), level = noisy(size=(8, 8)), torch.tensor([0.0, 0.1, 0.5])
    cond = replace(captions(), low_res=noisy(size=(4, 4))[0], low_res_level=level, low_res_blur=level)
    cond = replace(cond, labels=torch.tensor([0, 2, 3]))
    return network, lambda keys: network(x, t, replace(cond, dropout_keys=keys))


def classifier():
    torch.manual_seed(0)
    config = replace(CONFIG, **DROPOUT, classifier_enc_depth=1)
    network, (x, t) = NoisedClip(config, VOCABULARY), noisy(size=(8, 8))

    def run(keys):
        return torch.cat([network.encode_image(x, t, keys), network.encode_text(*captions(total=7).caption, keys)])

    return network, run


def latent_stage(config, **changed):
    short = {"down_blocks": (1, 1), "up_blocks": (1, 1), "up_repeats": (1, 1), "dropout": (0.2, 0.2)}
    network = make_latent(replace(config, **short, **changed))
    (x, t), cond = latents(config), conditioning(network.config)
    return network, lambda keys: network(x, t, replace(cond, dropout_keys=keys))


def stage_b():
    return latent_stage(B)


def stage_c():
    return latent_stage(own_text(C), use_checkpoint=True)


def lora():
    """Of a frozen base, which is in evaluation mode also in training."""
    base, run = latent_stage(C)
    network = Adapted(base, ("attn",), rank=2, alpha=2.0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    return network, run


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        slow(checkpointed, 11),
        (transformer, 3),
        slow(routed, 4),
        slow(upsampler, 9),
        slow(classifier, 6),
        slow(stage_b, 5),
        (stage_c, 6),
        slow(lora, 8),
    ],
)
def test_a_block_is_one_graph_for_all_steps_and_computes_the_same(make, expected):
    network, run = make()
    if make is not lora:
        randomize(network)
    steps = [torch.tensor([5, -7, 2**40]) + step for step in range(3)]
    plain = [run(keys) for keys in steps]
    gradients = torch.autograd.grad(plain[-1].square().sum(), list(network.parameters()), allow_unused=True)
    graphs, counts = Graphs(), []
    compile_training(network, graphs)
    for keys, before in zip(steps, plain, strict=True):
        out = run(keys)
        torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-5)
        counts.append(graphs.count)
    assert counts == [expected] * 3
    found = torch.autograd.grad(out.square().sum(), list(network.parameters()), allow_unused=True)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    network.eval()
    with torch.no_grad():
        assert not torch.equal(run(steps[0]), plain[0]) or make is lora  # without dropout
    assert graphs.count == expected  # not compiled
    assert not any(name.startswith("_orig_mod") for name in network.state_dict())


def test_blocks_that_differ_in_their_number_share_a_graph():
    graphs, layers = Graphs(), [Dropout(0.5) for _ in range(3)]
    number_dropouts(nn.Sequential(*layers))
    x, keys = torch.ones(2, 8, 4), torch.tensor([3, 4])

    @torch.compile(backend=graphs, fullgraph=True)
    def drop(layer):
        return layer(x, keys)

    masks = [drop(layer) for layer in layers]
    assert graphs.count == 1 and not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_networks_are_compiled_on_cuda_unless_a_setting_says_otherwise(setting, device, expected, monkeypatch):
    monkeypatch.setattr(kernels, "run_on", lambda device: device.type == "cuda")
    assert is_compiled(setting, torch.device(device)) is expected


@pytest.mark.parametrize(("changed", "dynamic"), [({}, False), ({"multi_aspect_ratio": "1,4/3"}, None)])
def test_the_flag_compiles_what_is_trained_for_one_size_of_images_or_several(changed, dynamic, monkeypatch):
    compiled = []
    monkeypatch.setattr(recipe, "compile_training", lambda network, **options: compiled.append((network, options)))
    network = make_run(compile=True, **changed).recipe().open(ALONE).network()
    assert compiled == [(network, {"dynamic": dynamic})]
    make_run(compile="auto").recipe().open(ALONE).network()
    assert len(compiled) == 1
