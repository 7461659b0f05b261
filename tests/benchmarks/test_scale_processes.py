"""Weak scaling and the overlap of the exchange, from made-up times, and in a job of two processes."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import scale_exchange, scale_processes
from benchmarks.scale_exchange import Bucket, Trace, Traced, covered, read_trace
from benchmarks.scale_processes import Rates

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
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in scale_processes.scaling_table(found, [4], 2).splitlines()
    ]
    assert rows[2:] == [
        ["4", "1", "800", "800", "5.0", "1.000", "1.000"],
        ["4", "2", "1000", "800", "8.0", "0.800", "1.000"],
        ["4", "4 processes on 2 cores", "2000", "1600", "8.0", "0.800", "1.000"],
    ]


def test_jobs_of_a_size_count_together(monkeypatch):
    """Rank by rank."""
    jobs = scale_processes.Jobs(batches=(4,), sizes=(1, 2, 2, 1))
    answers = iter([(1.0,), (2.0, 3.0), (4.0, 5.0), (3.0,)])

    def answer(size, work, flags, batches, repeats):
        assert (work, flags, batches, repeats) == (scale_processes.steps, jobs.flags, (4,), jobs.repeats)
        return [{(4, True): [seconds], (4, False): [2 * seconds]} for seconds in next(answers)]

    found = {}
    monkeypatch.setattr(scale_processes, "on_processes", answer)
    monkeypatch.setattr(scale_processes, "scaling_table", lambda times, batches, cores: found.update(times) or "table")
    assert scale_processes.weak_scaling(jobs) == "table"
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
    assert scale_exchange.trace_table(trace).splitlines()[-1] == "| together | 0.0 |  | 11 | 4 |"


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
    place = world.rank, world.size, scale_processes.cores(), torch.get_num_threads()
    seconds = scale_processes.steps(world, TINY, [2], 2)
    return place, seconds, scale_exchange.traces(world, Traced(TINY, 2, steps=1))


@pytest.mark.slow
def test_two_processes():
    own, ranks = scale_processes.cores(), scale_processes.on_processes(2, live)
    for rank, (place, seconds, _) in enumerate(ranks):
        assert place == (rank, 2, [own[rank % len(own)]], 1)
        assert {kind: len(values) for kind, values in seconds.items()} == {(2, True): 2, (2, False): 2}
        assert all(value > 0 for values in seconds.values() for value in values)
    (trace,), others = (traces for *_, traces in ranks)
    assert sum(bucket.size for bucket in trace.buckets) == trace.parameters > 1e5 and not others
    assert all(-trace.backward < bucket.begin < bucket.end for bucket in trace.buckets) and 0 <= trace.overlap <= 1
