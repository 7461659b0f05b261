import pytest

from diff_dalle.benchmarks import loader


@pytest.mark.parametrize("gate", [loader.decoding_gate, loader.loader_gate])
def test_both_sides_give_the_same_images(gate, monkeypatch):
    monkeypatch.setattr(loader, "COUNT", 6)
    loader.jpegs.cache_clear()
    for found, allowed in gate().values():
        assert found <= allowed
    loader.jpegs.cache_clear()
