"""What many processes read and hold, at sizes that can be counted; weak scaling and the overlap of the exchange, from
made-up times and in a job of two processes; and what many GPUs need."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import scale, scale_data, scale_plan
from benchmarks.scale import Bucket, Rates, Trace, Traced, covered, read_trace
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
    monkeypatch.setattr(scale, "weak_scaling", lambda jobs: "of processes")
    monkeypatch.setattr(scale, "exchange_tables", lambda: iter(["of buckets"]))
    monkeypatch.setattr(scale_plan, "tables", lambda cluster: iter(["of one preset", "of another"]))
    assumed, *tables = scale.tables()
    for words in ("1,000,000,000 samples in 100,000 shards", "`--preset shapes_32` in", "profiler", "8 GPUs a node"):
        assert words in assumed
    assert [text.split()[-1] for text in tables] == ["data", "processes", "buckets", "preset", "another"]


TINY = ("--preset", "shapes_32", "--num_channels", "8", "--num_res_blocks", "1", "--channel_mult", "1")
TINY += ("--enc_attn_dim", "8", "--enc_depth", "1")


def times(exchanging: float, alone: float, batch: int = 4) -> dict:
    """With an outlier, which a median leaves out."""
    return {(batch, True): [exchanging, exchanging, 9.0], (batch, False): [alone, 0.0, alone]}


def test_efficiency_is_of_what_the_cores_can_do():
    one, two = Rates.of([times(0.5, 0.4)], 4), Rates.of([times(0.8, 0.5), times(0.8, 1.0)], 4)
    assert (one, two) == (Rates(8.0, 10.0), Rates(10.0, 12.0))
    assert one.efficiencies(one, 1, 2) == (1.0, 1.0)
    assert two.efficiencies(one, 2, 2) == (10 / 16, 12 / 20)
    assert two.efficiencies(one, 2, 1) == (10 / 8, 12 / 10)
    assert Rates(15.2, 20.0).efficiencies(one, 4, 2) == (0.95, 1.0)  # four take turns on two cores


def test_the_table_says_where_processes_share_cores():
    found = {2: 2 * [times(1.0, 0.8)], 1: [times(0.8, 0.8)], 4: 4 * [times(2.0, 1.6)]}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in scale.scaling_table(found, [4], 2).splitlines()
    ]
    assert rows[2:] == [
        ["4", "1", "800", "800", "5.0", "1.000", "1.000"],
        ["4", "2", "1000", "800", "8.0", "0.800", "1.000"],
        ["4", "4 processes on 2 cores", "2000", "1600", "8.0", "0.800", "1.000"],
    ]


def test_jobs_of_a_size_count_together(monkeypatch):
    """Rank by rank."""
    jobs = scale.Jobs(batches=(4,), sizes=(1, 2, 2, 1))
    answers = iter([(1.0,), (2.0, 3.0), (4.0, 5.0), (3.0,)])

    def answer(size, work, flags, batches, repeats):
        assert (work, flags, batches, repeats) == (scale.steps, jobs.flags, (4,), jobs.repeats)
        return [{(4, True): [seconds], (4, False): [2 * seconds]} for seconds in next(answers)]

    found = {}
    monkeypatch.setattr(scale, "on_processes", answer)
    monkeypatch.setattr(scale, "scaling_table", lambda times, batches, cores: found.update(times) or "table")
    assert scale.weak_scaling(jobs) == "table"
    values = {size: [seconds[4, True] for seconds in ranks] for size, ranks in found.items()}
    assert values == {1: [[1.0, 3.0]], 2: [[2.0, 4.0], [3.0, 5.0]]}
    assert found[2][1][4, False] == [6.0, 10.0]


def test_overlap_is_the_part_within_the_backward_pass():
    """Times before and after the end of the backward pass, with buckets that are exchanged at the same time."""
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5 and covered([(0, 10), (1, 2), (5, 7)]) == 10
    buckets = Bucket(8, -10, -6), Bucket(8, -7, -4), Bucket(8, -1, 2), Bucket(8, 1, 3), Bucket(8, 4, 5)
    assert [bucket.exposed for bucket in buckets] == [0, 0, 2, 2, 1]
    trace = Trace(buckets, 20.0, 40)
    assert (trace.communicating, trace.exposed, trace.overlap) == (11, 4, 1 - 4 / 11)
    assert scale.trace_table(trace).splitlines()[-1] == "| together | 0.0 |  | 11 | 4 |"


def event(name: str, start: float, end: float, *shapes) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), input_shapes=list(shapes))


def test_gradients_are_what_is_exchanged_within_the_backward_pass():
    """The profiler gives microseconds, in no order; scalars are not gradients, nor is what comes before."""
    step = "autograd::engine::evaluate_function: "
    events = [
        event("gloo:all_reduce", 2050, 2500, [30]),
        event("gloo:all_reduce", 2400, 2700, []),
        event("gloo:all_reduce", 1200, 1700, [2, 5]),
        event("gloo:broadcast", 1300, 1400, [7]),
        event("gloo:all_reduce", 100, 200, [7]),
        event(step + "MulBackward0", 1000, 1500),
        event(step + "AccumulateGrad", 1500, 2000),
    ]
    trace = read_trace(events, [torch.zeros(10, dtype=torch.float64), torch.zeros(3, 10, dtype=torch.float64)])
    expected = [(80, -0.8, -0.3), (240, 0.05, 0.5)]
    assert [(b.size, b.begin, b.end) for b in trace.buckets] == [pytest.approx(each) for each in expected]
    assert trace.backward == 1.0 and trace.parameters == 320


def live(world):
    """Of each rank: its place, the times of its steps, and traces."""
    place = world.rank, world.size, scale.cores(), torch.get_num_threads()
    seconds = scale.steps(world, TINY, [2], 2)
    return place, seconds, scale.traces(world, Traced(TINY, 2, steps=1))


@pytest.mark.slow
def test_two_processes():
    own, ranks = scale.cores(), scale.on_processes(2, live)
    for rank, (place, seconds, _) in enumerate(ranks):
        assert place == (rank, 2, [own[rank % len(own)]], 1)
        assert {kind: len(values) for kind, values in seconds.items()} == {(2, True): 2, (2, False): 2}
        assert all(value > 0 for values in seconds.values() for value in values)
    (trace,), others = (traces for *_, traces in ranks)
    assert sum(bucket.size for bucket in trace.buckets) == trace.parameters > 1e5 and not others
    assert all(-trace.backward < bucket.begin < bucket.end for bucket in trace.buckets) and 0 <= trace.overlap <= 1
