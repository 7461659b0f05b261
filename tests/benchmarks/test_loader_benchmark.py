import pytest

from diff_dalle.benchmarks import loader


@pytest.mark.parametrize("gate", [loader.decoding_gate, loader.loader_gate])
def test_both_sides_give_the_same_images(gate, monkeypatch):
    monkeypatch.setattr(loader, "COUNT", 6)
    loader.jpegs.cache_clear()
    for found, allowed in gate().values():
        assert found <= allowed
    loader.jpegs.cache_clear()


def test_batches_of_one_aspect_ratio_hold_the_images_of_the_squares():
    """Each of them once, at sizes that differ."""
    for found, allowed in loader.bucket_gate().values():
        assert found <= allowed
    assert len({batch.images.shape for batch in loader.in_buckets()()}) > 2
