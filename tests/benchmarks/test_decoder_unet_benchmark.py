from dataclasses import replace
from functools import partial

import pytest
import torch
from marks import slow

from benchmarks import decoder_unet
from diff_dalle.batch import Conditioning
from diff_dalle.models.cost import peak_bytes
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import DecoderUnet

EXAMPLE = DecoderUnetConfig(dim=128, image_embed_dim=768, cond_dim=64, dim_mults=(1, 2, 4, 8))


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(decoder_unet, "NETWORK", replace(decoder_unet.NETWORK, dim_mults=(1, 2), image_embed_dim=5))
    monkeypatch.setattr(decoder_unet, "IMAGE_SIZE", 16)
    monkeypatch.setattr(decoder_unet, "BATCH_SIZE", 4)


@pytest.mark.usefixtures("_small")
def test_baseline_and_our_network_are_the_same_function():
    """With equal weights: outputs to 1e-5 and every parameter's gradient to 1e-4."""
    for found, most in decoder_unet.gate().values():
        assert 0 < found <= most


@pytest.mark.usefixtures("_small")
def test_checkpointing_gives_the_same_loss_and_gradients(monkeypatch):
    for found, most in decoder_unet.checkpoint_gate().values():
        assert 0 <= found <= most
    original = decoder_unet.our_network

    def network(use_checkpoint):
        model = original(use_checkpoint)
        with torch.no_grad():
            model.out_conv.bias += 0.01 * use_checkpoint
        return model

    monkeypatch.setattr(decoder_unet, "our_network", network)
    assert all(found > most for found, most in decoder_unet.checkpoint_gate().values())


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("side", [decoder_unet.plain, decoder_unet.ours, partial(decoder_unet.ours, True)])
def test_every_side_trains(side):
    step = side()
    losses = [step().item() for _ in range(3)]
    assert losses[2] < losses[0]


def test_the_network_is_the_example_at_a_quarter_of_its_width():
    assert replace(decoder_unet.NETWORK, dim=128, cond_dim=64, attn_heads=16) == EXAMPLE
    assert [4 * getattr(decoder_unet.NETWORK, name) for name in ("dim", "cond_dim", "attn_heads")] == [128, 64, 16]


@pytest.mark.parametrize(
    ("config", "most"),
    [(EXAMPLE, 0.4), slow(replace(EXAMPLE, memory_efficient=True), 0.505)],
)
def test_activation_checkpointing_halves_the_peak_memory(config, most):
    """Of the pass through the network at its full width, computed on the meta device. The memory-efficient network has
    little left to save: its norms keep no more than their inputs without checkpointing either."""
    peaks = []
    for use_checkpoint in (False, True):
        with torch.device("meta"):
            network = DecoderUnet(replace(config, checkpoint_during_training=use_checkpoint), learned_variance=True)
            inputs = torch.empty(4, 3, 64, 64), torch.empty(4), Conditioning(image_embedding=torch.empty(4, 768))
        peaks.append(peak_bytes(network, lambda network, inputs=inputs: network(*inputs)))
    assert peaks[1] <= most * peaks[0]
