"""The sampling thread and its queue, without any network."""

import pytest
from web_making import Gate

from diff_dalle.config import InputError
from diff_dalle.web.refusal import Refusal
from diff_dalle.web.worker import Worker


@pytest.fixture
def worker():
    made = Worker(max_queue=2, max_seconds=60)
    yield made
    made.close()


def test_jobs_are_done_one_at_a_time_and_in_order(worker):
    order = []
    gate = Gate()
    first = worker.submit(gate)
    assert gate.started.wait(10)
    rest = [worker.submit(lambda watch, i=i: order.append(i)) for i in range(2)]
    assert [job.snapshot().ahead for job in (first, *rest)] == [0, 1, 2] and not order
    gate.open.set()
    assert all(job.wait(10) for job in rest) and order == [0, 1]
    assert first.snapshot().result is gate and first.snapshot().refusal is None


def test_a_full_queue_is_busy_and_has_room_again_after_a_cancel(worker):
    gate = Gate()
    worker.submit(gate)
    assert gate.started.wait(10)
    waiting = [worker.submit(print) for _ in range(2)]
    with pytest.raises(Refusal, match="busy, try again: 2 requests") as refused:
        worker.submit(print)
    assert refused.value.status == 503
    waiting[0].cancel()
    assert waiting[0].over and waiting[0].snapshot().refusal.args == ("canceled",)
    assert waiting[1].snapshot().ahead == 1
    worker.submit(print)
    gate.open.set()


def test_places_are_taken_before_the_work_is_known(worker):
    """They count as waiting jobs, are given back when they are not used, and a job with one is never refused."""
    gate = Gate()
    worker.submit(gate)
    assert gate.started.wait(10)
    with worker.place() as first, worker.place():
        with pytest.raises(Refusal, match="busy, try again: 2 requests"), worker.place():
            pass
        with pytest.raises(Refusal, match="busy"):
            worker.submit(print)
        job = worker.submit(print, first)
        with pytest.raises(Refusal, match="busy"):
            worker.submit(print)
    assert job.snapshot().ahead == 1
    with pytest.raises(ZeroDivisionError), worker.place():
        raise ZeroDivisionError
    gate.open.set()
    assert job.wait(10)
    with worker.place() as place:
        assert worker.submit(print).wait(10)  # which is not kept waiting
        last = worker.submit(lambda watch: 3, place)
    assert last.wait(10) and last.snapshot().result == 3


def test_one_more_may_come_while_nothing_runs():
    """It runs at once."""
    worker = Worker(1, 60)
    with worker.place(), worker.place(), pytest.raises(Refusal, match="busy"), worker.place():
        pass
    worker.close()
    with pytest.raises(Refusal, match="stopping"), worker.place():
        pass


def test_a_running_job_ends_at_its_next_step(worker):
    gate = Gate()
    job = worker.submit(gate)
    assert gate.started.wait(10) and not job.over
    job.cancel()
    assert job.wait(10) and job.snapshot().refusal.status == 409 and gate.steps
    assert worker.submit(lambda watch: "next").wait(10)


def test_a_job_ends_at_the_first_step_after_its_time():
    worker, gate = Worker(1, max_seconds=0.05), Gate()
    job = worker.submit(gate)
    assert job.wait(10)
    done = job.snapshot()
    assert done.refusal.status == 408 and "longer than 0.05 s" in str(done.refusal) and done.seconds >= 0.05
    worker.close()


def test_what_goes_wrong_is_told_and_the_next_job_is_done(worker, capsys):
    def wrong(watch):
        raise InputError("steps is 0, but must be at least 1")

    def broken(watch):
        raise ZeroDivisionError("a secret of the server")

    jobs = [worker.submit(wrong)]
    assert jobs[0].wait(10)
    jobs.append(worker.submit(broken))
    assert jobs[1].wait(10)
    said = [job.snapshot().refusal for job in jobs]
    assert [getattr(refusal, "status", 400) for refusal in said] == [400, 500]
    assert str(said[0]).startswith("steps is 0") and "secret" not in str(said[1])
    assert "a secret of the server" in capsys.readouterr().err
    last = worker.submit(lambda watch: 3)
    assert last.wait(10) and last.snapshot().result == 3


def test_a_closed_worker_takes_nothing_and_ends_what_it_has():
    worker, gate = Worker(2, 60), Gate()
    jobs = [worker.submit(gate), worker.submit(print)]
    assert gate.started.wait(10)
    worker.close()
    assert all(job.over for job in jobs)
    with pytest.raises(Refusal, match="stopping"):
        worker.submit(print)
