from dataclasses import replace

import pytest
import torch
from network_making import TEXT, TRANSFORMER, captions, make_generator, noisy, randomize
from operation_counting import parameter_conversions
from torch import nn

from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig
from diff_dalle.models.noised_clip import NoisedClip, NoisedClipConfig
from diff_dalle.models.precision import for_inference, resolve_precision, training_precision
from diff_dalle.models.transformer import DenoiserConfig


def base():
    network = make_generator(num_classes=3, text_attention="joint")
    return network, lambda: network(*noisy(), replace(captions(), labels=torch.tensor([0, 3, 1])))


def transformer():
    network = make_generator(num_classes=3, **TRANSFORMER)
    return network, lambda: network(*noisy(), replace(captions(), labels=torch.tensor([0, 3, 1])))


def upsampler():
    torch.manual_seed(0)
    unet = DenoiserConfig(16, 8, 1, (1, 2), (8,), num_heads=2, resblock_updown=True)
    network = randomize(Generator(GeneratorConfig(unet, TEXT, LowResConfig(4, True)), 50, learned_variance=True))
    level = torch.tensor([0.0, 0.1, 0.5])
    cond = replace(captions(), low_res=noisy(3, (4, 4))[0], low_res_level=level, low_res_blur=level)
    return network, lambda: network(*noisy(), cond)


def classifier():
    torch.manual_seed(0)
    config = NoisedClipConfig(
        16,
        classifier_width=8,
        classifier_depth=1,
        classifier_channel_mult=(1, 2),
        classifier_attention_resolutions=(8,),
        classifier_num_heads=2,
        classifier_enc_attn_dim=12,
        classifier_enc_depth=1,
        classifier_enc_heads=3,
    )
    network = randomize(NoisedClip(config, 50))
    return network, lambda: torch.stack([network.encode_image(*noisy()), network.encode_text(*captions().caption)])


def under_autocast(network, run):
    """The result, and how often a parameter was converted."""
    results = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        count = parameter_conversions(network, lambda: results.append(run()))
    return results[0], count


NETWORKS = [base, transformer, upsampler, classifier]


@pytest.mark.parametrize("make", NETWORKS)
def test_weights_converted_once_give_the_results_of_autocast(make):
    network, run = make()
    network.requires_grad_(False)
    expected, before = under_autocast(network, run)
    exact = run()
    assert for_inference(network, "bf16") is network
    found, after = under_autocast(network, run)
    assert torch.equal(found, expected) and not torch.equal(found, exact)
    assert before > 40 and after <= 1  # a classifier's position embeddings
    assert sum(p.dtype == torch.bfloat16 for p in network.parameters()) == before - after  # nothing else was converted


@pytest.mark.parametrize("make", NETWORKS)
def test_norms_embeddings_and_full_precision_layers_are_not_converted(make):
    network, _ = make()
    full = {
        f"{path}.{name}." if path else f"{name}."
        for path, module in network.named_modules()
        for name in getattr(module, "full_precision", ())
    }
    for_inference(network, "fp16")
    for path, module in network.named_modules():
        weights = [p for p in module.parameters(recurse=False)]
        half = isinstance(module, (nn.Linear, nn.Conv2d)) and not f"{path}.".startswith(tuple(full))
        assert all((p.dtype == torch.float16) == half for p in weights), path


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "cpu_name", "expected"),
    [
        (True, True, "Intel(R) Xeon(R) Processor", "bf16"),
        (False, True, "AMD EPYC", "bf16"),
        (False, False, "AMD EPYC", "fp32"),
        (False, True, "Intel(R) Xeon(R) Processor", "fp32"),
    ],
)
def test_auto_is_half_precision_in_training_where_the_cpu_is_faster_in_it(
    monkeypatch, amx, avx512_bf16, cpu_name, expected
):
    capabilities = {"avx512_bf16": avx512_bf16, "cpu_name": cpu_name}
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    cpu = torch.device("cpu")
    assert training_precision("auto", cpu) == expected
    assert training_precision("fp32", cpu) == resolve_precision("auto", cpu) == "fp32"
