from dataclasses import replace

import pytest
import torch

from benchmarks import latent
from benchmarks.registry import BENCHMARKS
from diff_dalle.models.latent.config import LatentTextConfig

SIDES = ["b", "c"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """A quarter of the width, with the parts of the tiny sizes."""
    for name, config in latent.STAGES.items():
        text = LatentTextConfig(enc_attn_dim=16, enc_depth=1, enc_heads=2, text_length=5)
        text = text if config.text.enc_attn_dim else config.text
        widths = tuple(width // 8 for width in config.widths)
        small = replace(config, widths=widths, cond_width=16, heads=tuple(n // 2 for n in config.heads), text=text)
        monkeypatch.setitem(latent.STAGES, name, small)
    monkeypatch.setattr(latent, "BATCH_SIZE", 3)


@pytest.mark.parametrize("stage", SIDES)
def test_baseline_and_our_network_are_the_same_function(stage):
    """With equal weights: outputs to 1e-5 and every parameter's gradient to 1e-4."""
    for found, most in latent.gate(stage).values():
        assert 0 < found <= most


@pytest.mark.parametrize("stage", SIDES)
def test_another_function_is_noticed(stage, monkeypatch):
    original = latent.plain_network

    def network(config):
        model = original(config)
        with torch.no_grad():
            model.up_blocks[1][0].mlp[2].gamma += 0.01
        return model

    monkeypatch.setattr(latent, "plain_network", network)
    assert all(found > most for found, most in latent.gate(stage).values())


@pytest.mark.parametrize("stage", SIDES)
@pytest.mark.parametrize("side", ["plain", "ours"])
def test_every_side_trains(stage, side):
    step = getattr(latent, side)(stage)
    losses = [step().item() for _ in range(5)]
    assert losses[4] < losses[0]


def test_the_networks_are_the_tiny_sizes_at_64_pixels():
    """Which stage A and the semantic encoder of these sizes make 16 × 16 and 8 × 8 positions of."""
    for stage, side in (("b", 16), ("c", 8)):
        assert latent.problem(latent.STAGES[stage])[0].shape[2:] == (side, side)
        benchmark = BENCHMARKS[f"latent_{stage}"]
        assert "tiny" in benchmark.title and benchmark.target < 1 and benchmark.memory_target <= 1
