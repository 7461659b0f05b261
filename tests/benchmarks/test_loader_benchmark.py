import sys

import pytest

from benchmarks import loading


@pytest.fixture
def six_jpegs(monkeypatch):
    monkeypatch.setattr(loading, "COUNT", 6)
    loading.jpegs.cache_clear()
    yield
    loading.jpegs.cache_clear()


@pytest.mark.usefixtures("six_jpegs")
@pytest.mark.parametrize("gate", [loading.decoding_gate, loading.loader_gate, loading.gate])
def test_both_sides_give_the_same_images(gate):
    for found, allowed in gate().values():
        assert found <= allowed


@pytest.mark.usefixtures("six_jpegs")
def test_the_fastest_loading_gives_the_same_images():
    pytest.importorskip("simplejpeg")
    assert loading.from_shards(True)().shape == loading.from_files()().shape == (6, 3, 64, 64)
    for found, allowed in loading.gate(True).values():
        assert found <= allowed


@pytest.mark.usefixtures("six_jpegs")
def test_workers_give_the_same_batches(monkeypatch):
    monkeypatch.setattr(loading, "STREAM", 2)
    monkeypatch.setattr(loading, "STREAM_BATCH", 4)
    assert loading.workers_gate() == {"1 workers": (0.0, 0.0), "2 workers": (0.0, 0.0)}


@pytest.mark.skipif(sys.platform != "linux", reason="memory as Linux reports it")
def test_the_memory_table_has_a_row_for_each_fifth():
    lines = loading.memory_table(800).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["160", "320", "480", "640", "800"]
    for line in lines:
        resident, private, worker, own = (float(cell) for cell in line.split("|")[2:6])
        assert resident > private > 0 and worker > own > 0


def test_batches_of_one_aspect_ratio_hold_the_images_of_the_squares():
    """Each of them once, at sizes that differ."""
    for found, allowed in loading.bucket_gate().values():
        assert found <= allowed
    assert len({batch.images.shape for batch in loading.in_buckets()()}) > 2
