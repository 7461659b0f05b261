"""Benchmarks of training steps of single networks, at small sizes: both sides compute the same, and both train."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from marks import slow

from benchmarks import decoder_unet, latent, use_checkpoint
from diff_dalle.batch import Conditioning
from diff_dalle.models.cost import peak_bytes
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.latent.config import LatentTextConfig


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Stages B and C: a quarter of the width, with the parts of the tiny sizes."""
    small = replace(decoder_unet.NETWORK, dim_mults=(1, 2), image_embed_dim=5)
    for name, value in {"NETWORK": small, "IMAGE_SIZE": 16, "BATCH_SIZE": 4}.items():
        monkeypatch.setattr(decoder_unet, name, value)
    for name, config in latent.STAGES.items():
        text = LatentTextConfig(enc_attn_dim=16, enc_depth=1, enc_heads=2, text_length=5)
        text = text if config.text.enc_attn_dim else config.text
        widths = tuple(width // 8 for width in config.widths)
        small = replace(config, widths=widths, cond_width=16, heads=tuple(n // 2 for n in config.heads), text=text)
        monkeypatch.setitem(latent.STAGES, name, small)
    monkeypatch.setattr(latent, "BATCH_SIZE", 3)
    monkeypatch.setattr(use_checkpoint, "IMAGE_SIZE", 32)


@pytest.mark.parametrize("gate", [decoder_unet.gate, partial(latent.gate, "b"), partial(latent.gate, "c")])
def test_baseline_and_our_network_are_the_same_function(gate):
    """With equal weights: outputs to 1e-5 and every parameter's gradient to 1e-4; and they are not one network."""
    for found, most in gate().values():
        assert 0 < found <= most


@pytest.mark.parametrize("stage", "bc")
def test_another_function_is_noticed(stage, monkeypatch):
    original = latent.plain_network

    def network(config):
        model = original(config)
        with torch.no_grad():
            model.up_blocks[1][0].mlp[2].gamma += 0.01
        return model

    monkeypatch.setattr(latent, "plain_network", network)
    assert all(found > most for found, most in latent.gate(stage).values())


@pytest.mark.parametrize(
    ("module", "gate", "name", "network"),
    [
        (decoder_unet, "checkpoint_gate", "our_network", lambda model: model),
        slow(use_checkpoint, "gate", "network", lambda model: model.unet),
    ],
)
def test_checkpointing_gives_the_same_loss_and_gradients_and_a_difference_is_seen(
    module, gate, name, network, monkeypatch
):
    for found, most in getattr(module, gate)().values():
        assert 0 <= found <= most
    original = getattr(module, name)

    def changed(checkpointed):
        model = original(checkpointed)
        with torch.no_grad():
            network(model).out_conv.bias += 0.01 * checkpointed
        return model

    monkeypatch.setattr(module, name, changed)
    assert all(found > most for found, most in getattr(module, gate)().values())


@pytest.mark.parametrize(
    "side",
    [
        *(decoder_unet.plain, decoder_unet.ours, partial(decoder_unet.ours, True)),
        *(partial(side, stage) for stage in "bc" for side in (latent.plain, latent.ours)),
    ],
)
def test_every_side_trains(side):
    step = side()
    losses = [step().item() for _ in range(5)]
    assert losses[4] < losses[0]


@pytest.mark.parametrize(("memory_efficient", "most"), [(False, 0.4), slow(True, 0.505)])
def test_activation_checkpointing_halves_the_peak_memory(memory_efficient, most, monkeypatch):
    """Of the pass through the decoder's network at its full width, computed on the meta device. The memory-efficient
    network has little left to save: its norms keep no more than their inputs without checkpointing either."""
    monkeypatch.undo()
    config = replace(decoder_unet.NETWORK, dim=128, cond_dim=64, attn_heads=16, memory_efficient=memory_efficient)
    example = DecoderUnetConfig(dim=128, image_embed_dim=768, cond_dim=64, dim_mults=(1, 2, 4, 8))  # as documented
    assert config == replace(example, memory_efficient=memory_efficient, as_published=True)
    assert [4 * getattr(decoder_unet.NETWORK, name) for name in ("dim", "cond_dim", "attn_heads")] == [128, 64, 16]
    peaks = []
    for checkpointed in (False, True):
        with torch.device("meta"):
            network = DecoderUnet(replace(config, checkpoint_during_training=checkpointed), learned_variance=True)
            inputs = torch.empty(4, 3, 64, 64), torch.empty(4), Conditioning(image_embedding=torch.empty(4, 768))
        peaks.append(peak_bytes(network, lambda network, inputs=inputs: network(*inputs)))
    assert peaks[1] <= most * peaks[0]


@pytest.mark.slow
def test_the_checkpointed_side_saves_less_for_the_backward_pass():
    """Bytes saved by the timed work; views of one tensor count once."""
    sizes = []
    for side in (use_checkpoint.without_checkpoint, use_checkpoint.with_checkpoint):
        work, saved = side(), {}

        def save(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor  # a reference, so that the address is not reused
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = work()
        assert loss.isfinite()
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    assert sizes[1] < 0.45 * sizes[0]
