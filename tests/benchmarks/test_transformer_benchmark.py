from dataclasses import replace

import pytest

from benchmarks import transformer

flops = transformer.flops_per_image


def test_both_sides_need_the_same_flops():
    ((found, allowed),) = transformer.gate().values()
    assert 0 <= found <= allowed


@pytest.mark.slow
def test_the_gate_sees_another_layer(monkeypatch):
    deeper = replace(transformer.SUBJECT, config=replace(transformer.NETWORK, depth=transformer.NETWORK.depth + 1))
    monkeypatch.setattr(transformer, "flops_per_image", lambda subject: flops(deeper))
    ((found, allowed),) = transformer.gate().values()
    assert found > allowed


@pytest.mark.parametrize("side", [transformer.torchs, transformer.ours])
def test_a_step_of_either_side_runs(side, monkeypatch):
    monkeypatch.setattr(
        transformer, "SUBJECT", replace(transformer.SUBJECT, config=replace(transformer.NETWORK, depth=2))
    )
    monkeypatch.setattr(transformer, "BATCH_SIZE", 1)
    side()()
