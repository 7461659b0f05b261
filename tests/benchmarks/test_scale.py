"""What many processes read and hold, and what many GPUs need, at sizes that can be counted."""

import re

import numpy as np
import pytest

from benchmarks import scale, scale_data, scale_exchange, scale_plan, scale_processes
from benchmarks.scale_data import Fleet
from diff_dalle.commands.info import describe, parse_info, preset_networks
from diff_dalle.config import InputError
from diff_dalle.data.collection import collect
from diff_dalle.data.order import Order, windows_kept
from diff_dalle.data.shards import ShardFiles

FLEET = Fleet(shards=50, samples=10_000, nodes=2, local=8, fraction=1.0, resumed=2.3)


def test_the_processes_share_an_epoch():
    found = scale_data.reading(FLEET)
    assert found.distinct == FLEET.shards and found.samples == FLEET.samples
    # A stream is read on one node: only the windows that two of the 8 streams share are opened on both.
    assert FLEET.shards <= found.opened.sum() <= FLEET.shards + 7 * FLEET.window


def test_a_process_that_reads_what_another_does_is_found(monkeypatch):
    monkeypatch.setattr(Fleet, "slots", lambda self: [0, *range(15)])
    with pytest.raises(InputError, match="10,000 samples, 9,375 of them different"):
        scale_data.reading(FLEET)


def test_a_start_finds_the_described_shards(tmp_path):
    scale_data.describe_shards(FLEET, str(tmp_path))
    found = collect([FLEET.source], scale_data.REQUIRED, ShardFiles(index_cache=str(tmp_path)))
    assert found.counts.tolist() == [200] * 50 and not found.left_out
    begun = scale_data.start(FLEET, str(tmp_path))
    assert set(begun.kept) == set(begun.seconds) - {scale_data.LISTING}
    shards, members = Order(found.counts, 0, 8, FLEET.window).samples_at(FLEET.first_chunk())
    assert begun.tables == len(set(shards.tolist()))
    spans = found.members(int(shards[0])).spans["txt"]
    assert spans[members[0]].tolist() == [int(4 * members[0] + 3) * 512, 512]  # a header and a block each


def test_a_process_keeps_the_windows_of_its_own_streams():
    """As few as it may without computing one twice: 8 streams, of which each of 16 processes reads one."""
    assert [windows_kept(8, n) for n in (1, 2, 3, 4, 16)] == [16, 8, 16, 4, 2]
    order, alone = FLEET.order(np.full(50, 200)), Order([200] * 50, 0, 8, FLEET.window)
    mixed = []
    order._mix = lambda epoch, window, size: mixed.append((epoch, window)) or Order._mix(order, epoch, window, size)
    for begin in range(3, 3 * FLEET.samples, 16 * 8):
        positions = np.arange(begin, begin + 16 * 8, 16)
        assert np.array_equal(order.samples_at(positions), alone.samples_at(positions))
        assert len(order._mixes) <= 2
    assert len(set(mixed)) == len(mixed)


@pytest.fixture(scope="module")
def tiny():
    return preset_networks("shapes_32")[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gpus"), [("ddp", 8), ("hsdp", 64)])
def test_memory_is_what_info_says(mode, gpus, tiny):
    cluster = scale_plan.Cluster()
    run = scale_plan.on_gpus("shapes_32", mode, gpus, cluster)
    flags = ["--preset", "shapes_32", "--parallel", mode, "--processes", str(gpus)]
    text = describe(parse_info(flags + (["--shard_processes", "8"] if mode == "hsdp" else [])))
    pattern = r"as set: ([\d.]+) GiB" if mode == "ddp" else r"processes \(--parallel \w+\): ([\d.]+) GiB"
    assert f"{scale_plan.memory(run, tiny, gpus) / 2**30:,.2f}" == re.search(pattern, text)[1]


def test_bytes_of_a_step(tiny):
    """Rings counted by hand."""
    cluster, parameters = scale_plan.Cluster(), tiny.parameters
    run = scale_plan.on_gpus("shapes_32", "fsdp", 64, cluster)
    pieces = run.training.batch_size // (run.training.microbatch or run.training.batch_size)
    ddp = scale_plan.traffic(run, tiny, "ddp", 64, cluster)
    updates = 2 * sum(rows * columns for rows, columns in tiny.matrices)  # Muon's, in bf16
    assert 0 < updates < 2 * parameters
    exchanged = 8 * parameters + updates
    assert (ddp.within, ddp.between) == (exchanged * 7 / 8, exchanged / 8 * 7 / 8)
    assert scale_plan.traffic(run, tiny, "ddp", 8, cluster).within == exchanged * 7 / 8
    rest = sum(int(np.prod(shape)) for shape in tiny.shapes[-1])
    gathered = pieces * 2 * (2 * (parameters - rest) + 4 * rest)
    fsdp = scale_plan.traffic(run, tiny, "fsdp", 64, cluster)
    sent = gathered + 4 * parameters
    assert (fsdp.within, fsdp.between) == (sent * 7 / 8, sent / 8 * 7 / 8)
    hsdp = scale_plan.traffic(run, tiny, "hsdp", 64, cluster)
    assert hsdp.within == (gathered + 4 * parameters) * 7 / 8
    assert hsdp.between == exchanged / 8 * 7 / 8
    assert hsdp.seconds(cluster) == hsdp.within / 450e9 + hsdp.between / 50e9


def test_time_of_a_step(tiny):
    run = scale_plan.on_gpus("shapes_32", "ddp", 8, scale_plan.Cluster())
    passes = 4 if tiny.probe.checkpointed else 3
    expected = passes * tiny.flops(32) * run.training.batch_size / 2e9
    assert scale_plan.compute_seconds(run, tiny, scale_plan.Cluster(peak=4e9, mfu=0.5)) == pytest.approx(expected)


def test_the_plan_leaves_out_what_is_impossible(monkeypatch):
    monkeypatch.setattr(scale_plan, "GPUS", (8, 64))
    rows = list(scale_plan.rows("shapes_32", scale_plan.Cluster()))
    assert [row[:2] for row in rows] == [[8, "ddp"], [8, "fsdp"], [64, "ddp"], [64, "fsdp"], [64, "hsdp"]]


@pytest.mark.parametrize(
    ("preset", "mode"),
    [(scale_plan.PRESETS[0], "hsdp"), *((scale_plan.PRESETS[1], mode) for mode in scale_plan.MODES)],
)
def test_the_run_has_the_parallelism_of_its_row(preset, mode):
    """Also where the preset itself asks for another, as the second one does."""
    assert scale_plan.on_gpus(preset, mode, 64, scale_plan.Cluster()).training.sharding.parallel == mode


def test_assumptions_stand_above_all_tables(monkeypatch):
    monkeypatch.setattr(scale_data, "tables", lambda fleet: "of data")
    monkeypatch.setattr(scale_processes, "weak_scaling", lambda jobs: "of processes")
    monkeypatch.setattr(scale_exchange, "tables", lambda: iter(["of buckets"]))
    monkeypatch.setattr(scale_plan, "tables", lambda cluster: iter(["of one preset", "of another"]))
    assumed, *tables = scale.tables()
    for words in ("1,000,000,000 samples in 100,000 shards", "`--preset shapes_32` in", "profiler", "8 GPUs a node"):
        assert words in assumed
    assert [text.split()[-1] for text in tables] == ["data", "processes", "buckets", "preset", "another"]
