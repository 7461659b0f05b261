"""Launcher detection, and jobs of two processes that must end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from clip_making import make_batch, make_task, with_draws
from forking import ends, run_ranks, start_ranks
from marks import slow
from ranks import run_ranks_of

from diff_dalle.config import InputError
from diff_dalle.distributed.devices import pick_device
from diff_dalle.distributed.launch import DistributedConfig, _report, detect, launch, run_script
from diff_dalle.distributed.world import ProcessInfo, Vote, World

TESTS = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.dirname(sys.executable)


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, ProcessInfo("single")),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, ProcessInfo("single")),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
            ProcessInfo("mpi", 3, 4, 1, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            ProcessInfo("mpi", 1, 2, 1, 2),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"},
            ProcessInfo("torchrun", 5, 8, 1, 4),
        ),
        (
            {
                "SLURM_STEP_NUM_TASKS": "6",
                "SLURM_PROCID": "4",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
            },
            ProcessInfo("slurm", 4, 6, 1, 3),
        ),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ProcessInfo("single")),  # python run directly in a batch script
    ],
)
def test_detect(env, place):
    assert detect(env) == place


def test_one_process_does_not_communicate():
    with launch(DistributedConfig(device="cpu")) as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.broadcast("x") == "x" and world.gather(3) == [3]
        assert not torch.distributed.is_initialized()


def test_a_vote_of_one():
    vote = Vote(World(ProcessInfo("single"), torch.device("cpu")))
    for number in (0, 3, 0):
        vote.cast(number)
        assert vote.answer() == number


def test_missing_device_is_named():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="device is .cuda., but must be cpu"), launch(DistributedConfig(device="cuda")):
        pass


def test_one_gpu_per_process_or_an_error(monkeypatch):
    def picked(count, *place):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return pick_device("cuda", ProcessInfo(*place))

    assert picked(8, "torchrun", 13, 16, 5, 8).index == 5
    assert picked(1, "slurm", 13, 16, 5, 8).index == 0  # srun --gpus-per-task 1
    with pytest.raises(InputError, match="8 processes were started on a machine with 1 GPU"):
        picked(1, "torchrun", 13, 16, 5, 8)
    assert pick_device("cuda:0").index == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1").index == 1
    with pytest.raises(InputError, match="must be below cuda:2: this machine has 2 GPUs"):
        pick_device("cuda:2")
    with pytest.raises(InputError, match="must be cuda for 2 processes"):
        pick_device("cuda:1", ProcessInfo("torchrun", 1, 2, 1, 2))
    with pytest.raises(InputError, match="device is 'cuda:x', but must be one of auto"):
        DistributedConfig(device="cuda:x")


def test_a_bug_prints_its_traceback_without_secrets(capsys):
    def main():
        raise KeyError("https://user:password@host/a.tar?signature=abc")

    with pytest.raises(SystemExit, match="1"):
        run_script(main)
    said = capsys.readouterr().err
    assert "Traceback" in said and "KeyError" in said and "in main" in said
    assert "password" not in said and "abc" not in said


LAUNCHERS = {
    "mpiexec": [os.path.join(BIN, "mpiexec"), "-n", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}
PREAMBLE = """
import torch
from diff_dalle.distributed.launch import DistributedConfig, launch, run_script
from diff_dalle.distributed.world import Vote
from diff_dalle.config import InputError
"""


def environment():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "SLURM_"))}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([TESTS, *sys.path])}


def write_job(tmp_path, body):
    script = tmp_path / "job.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    return str(script)


def run_job(launcher, tmp_path, body, size=2):
    """srun stands for processes with its variables, which start faster than those of a launcher."""
    script = write_job(tmp_path, body)
    if launcher == "srun":
        return run_ranks([script], environment(), size)
    return subprocess.run(
        [*LAUNCHERS[launcher], script], capture_output=True, text=True, timeout=240, env=environment()
    )


def start_by_srun(tmp_path, body, size=2):
    return start_ranks([write_job(tmp_path, body)], environment(), size)


AGREE = """
def agree(world):
    assert world.size == 2
    assert world.broadcast(world.rank) == 0
    assert world.gather(world.rank * 10) == [0, 10]
    mine = torch.tensor([world.rank, world.rank + 2])
    assert world.interleave(mine).tolist() == [0, 1, 2, 3]
    vote = Vote(world)
    for number in (2, 0):
        vote.cast(number * world.rank)
        assert vote.answer() == number
    assert world.maximum(torch.tensor([1.0 + world.rank])).item() == 2.0
    assert (world.node, world.nodes) == (0, 1)
    world.print("fine")

def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        agree(world)
"""


@pytest.mark.slow
def test_two_processes_of_torchrun_agree(tmp_path):
    result = run_job("torchrun", tmp_path, AGREE + "run_script(main)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("fine") == 1


def test_two_processes_of_srun_agree():
    assert run_ranks_of(2, PREAMBLE + AGREE + "agree(world)").count("fine") == 1


def test_a_rank_without_its_device_is_named(tmp_path):
    result = run_job(
        "srun",
        tmp_path,
        """
        from diff_dalle.distributed.launch import detect
        def main():
            torch.cuda.device_count = lambda: 0
            device = "cuda" if detect().rank == 1 else "cpu"
            with launch(DistributedConfig(device=device, start_timeout=120)):
                pass
        run_script(main)
    """,
    )
    assert result.returncode != 0 and "rank 1: --device is 'cuda', but must be cpu" in result.stderr


FAILURES = {
    "raise InputError('the flag is wrong')": "the flag is wrong",
    "raise RuntimeError('broken')": "RuntimeError: broken",
    "sys.exit(3)": "status 3",
}
FAILING = """
        import sys
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
                if world.rank == 1:
                    {failure}
                world.barrier()
        run_script(main)
"""


def test_one_failing_rank_ends_the_job_with_its_reason(tmp_path):
    """The other rank waits in a collective; with a plain exception in one rank MPI would wait forever."""
    result = run_job("mpiexec", tmp_path, FAILING.format(failure="raise RuntimeError('broken')"))
    assert result.returncode != 0
    assert "rank 1: " in result.stderr and "RuntimeError: broken" in result.stderr, result.stderr


def test_one_failing_rank_ends_processes_that_nobody_watches(tmp_path):
    jobs = {}
    for number, failure in enumerate(FAILURES):
        (tmp_path / str(number)).mkdir()
        jobs[failure] = start_by_srun(tmp_path / str(number), FAILING.format(failure=failure))
    for failure, processes in jobs.items():
        (other, *_), (status, _, stderr) = ends(processes)
        assert other not in (0, None) and status not in (0, None)
        assert "rank 1: " in stderr and FAILURES[failure] in stderr


LOST = """
        import os, signal
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which MPICH's mpiexec sends to the other ranks
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=120, timeout={timeout})) as world:
                world.barrier()
                if world.rank == {lost}:
                    os.kill(os.getpid(), signal.{signal})
                {waiting}
        run_script(main)
"""
COLLECTIVE, COMPUTING = "world.barrier()", "__import__('time').sleep(1000)"


def test_a_killed_rank_is_named_by_every_other(tmp_path):
    """Long before any time-out, whatever the others do; here under srun, whose other processes live on."""
    jobs = []
    for lost, waiting in ((2, COLLECTIVE), (1, COMPUTING), (0, COMPUTING)):
        body = LOST.format(lost=lost, signal="SIGKILL", waiting=waiting, timeout=1000)
        (tmp_path / str(lost)).mkdir()
        jobs.append((lost, start_by_srun(tmp_path / str(lost), body, size=3)))
    for lost, processes in jobs:
        found = ends(processes)
        assert found.pop(lost)[0] == -9
        for status, _, stderr in found:
            assert status == 1 and f"stops because rank {lost} is gone" in stderr, (status, stderr)


def test_a_stopped_rank_is_named_within_the_time_out(tmp_path):
    jobs = []
    for lost in (1, 0):
        body = LOST.format(lost=lost, signal="SIGSTOP", waiting=COLLECTIVE, timeout=8)
        (tmp_path / str(lost)).mkdir()
        jobs.append((lost, start_by_srun(tmp_path / str(lost), body, size=3)))
    for lost, processes in jobs:
        stopped = processes.pop(lost)
        found = ends(processes)
        assert stopped.poll() is None
        stopped.kill()
        ends([stopped])
        for status, _, stderr in found:
            assert status == 1 and f"stops because rank {lost} has given no sign of life for 4 s" in stderr, stderr


@pytest.mark.parametrize("launcher", ["torchrun", slow("mpiexec")])
def test_a_killed_rank_ends_the_job_under_every_launcher(launcher, tmp_path):
    """MPICH's mpiexec says itself how the process ended, and may kill the others before they can name it."""
    result = run_job(launcher, tmp_path, LOST.format(lost=1, signal="SIGKILL", waiting=COLLECTIVE, timeout=1000))
    named = "rank 0 stops because rank 1 is gone" in result.stderr
    by_mpiexec = launcher == "mpiexec" and "Killed (signal 9)" in result.stdout
    assert result.returncode != 0 and (named or by_mpiexec), (result.stdout, result.stderr)


def test_missing_processes_are_named(tmp_path):
    body = """
        from diff_dalle.distributed.launch import detect
        def main():
            if detect().rank < 2:
                with launch(DistributedConfig(device="cpu", start_timeout=4)):
                    pass
        run_script(main)
    """
    (status, _, stderr), *_ = ends(start_by_srun(tmp_path, body, size=3))
    assert status == 2 and re.search(r"after 4 s these processes are missing: ranks \[.*2\] of 3 \(--start", stderr), (
        stderr
    )


def test_a_start_of_mpi_that_hangs_ends_with_a_sentence(tmp_path):
    """Here the process manager never answers."""
    script = tmp_path / "job.py"
    script.write_text(
        PREAMBLE
        + textwrap.dedent(
            """
            def main():
                with launch(DistributedConfig(device="cpu", start_timeout=2)):
                    pass
            run_script(main)
            """
        )
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        env = {**os.environ, "PMI_FD": str(theirs.fileno()), "PMI_RANK": "1", "PMI_SIZE": "2"}
        result = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=240,
            pass_fds=[theirs.fileno()],
            env={**env, "PYTHONPATH": os.pathsep.join([TESTS, *sys.path])},
        )
    assert result.returncode == -signal.SIGTERM
    assert "error: rank 1: MPI has not started after 2 s" in result.stderr and "--start_timeout" in result.stderr


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 0.0])
@pytest.mark.parametrize("name", ["timeout", "start_timeout"])
def test_time_outs_are_finite(name, value):
    with pytest.raises(InputError, match=f"{name} is {value:g}, but must be above 0 and at most 10,000,000"):
        DistributedConfig(**{name: value})


ORDERLY = (
    AGREE
    + """
        raise JobEnd(143)

from diff_dalle.distributed.launch import JobEnd
run_script(main)
"""
)


def test_all_ranks_agree_and_end_in_order_with_the_status_of_the_job(tmp_path):
    by_mpi = run_job("mpiexec", tmp_path, ORDERLY)
    assert by_mpi.stdout.count("fine") == 1, by_mpi.stderr
    for status, _, stderr in ((by_mpi.returncode, "", by_mpi.stderr), *ends(start_by_srun(tmp_path, ORDERLY))):
        assert status == 143 and "rank" not in stderr, stderr


def test_nodes_are_told_apart_by_their_hosts(tmp_path):
    """Here each rank is made to say another name."""
    result = run_job(
        "srun",
        tmp_path,
        """
        import os, socket
        socket.gethostname = lambda: "b" if os.environ["SLURM_PROCID"] == "0" else "a"
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
                assert (world.node, world.nodes, world.node_of) == (world.rank, 2, (0, 1))
        run_script(main)
    """,
    )
    assert result.returncode == 0, result.stderr


def test_a_value_of_many_messages_is_broadcast_whole():
    run_ranks_of(
        2,
        """
        names = [f"s3://bucket/shard-{i:06d}.tar" for i in range(5000)]
        with mock.patch("diff_dalle.distributed.world.BROADCAST_BYTES", 1000):
            assert world.broadcast(names if world.is_main else None) == names
        assert world.broadcast(None) is None
        """,
    )


def test_slots_put_the_values_of_two_nodes_in_order(tmp_path):
    """Four processes that take themselves for two on each of two nodes: losses and gradients are those of one."""
    result = run_job(
        "srun",
        tmp_path,
        f"""
        import os, socket
        from clip_making import make_batch, make_task, with_draws
        from diff_dalle.training.optim import OptimConfig
        from diff_dalle.training.trainee import Trainee
        socket.gethostname = lambda: "node" + str(int(os.environ["SLURM_PROCID"]) // 2)
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
                assert (world.node, world.nodes, world.slot) == (world.rank // 2, 2, [0, 2, 1, 3][world.rank])
                mine = torch.tensor([world.slot, world.slot + 4.0], requires_grad=True)
                together = world.interleave(mine)
                assert together.tolist() == list(range(8))
                (together * torch.arange(8.0)).sum().backward()
                assert mine.grad.tolist() == [4.0 * world.slot, 4.0 * (world.slot + 4)]
                task = make_task(world=world)
                trainee = Trainee(task, OptimConfig(), "fp32", world)
                pieces = with_draws([make_batch(range(world.slot, 8, 4))])
                (values,) = task.backward(pieces, trainee._forward(""), 1.0)
                losses = world.interleave(values["loss"])
                if world.is_main:
                    torch.save(losses, {str(tmp_path / "losses.pt")!r})
        run_script(main)
    """,
        size=4,
    )
    assert result.returncode == 0, result.stderr
    task = make_task()
    (values,) = task.backward(with_draws([make_batch(range(8))]), lambda batch, draw, sync: task(batch, draw), 1.0)
    torch.testing.assert_close(torch.load(tmp_path / "losses.pt"), values["loss"].detach())


def test_gradients_come_back_to_the_rank_that_sent_the_values():
    """Summed over the ranks that used them; gradients of other tensors in the sum are unchanged."""
    run_ranks_of(
        2,
        """
        mine = torch.tensor([[1.0], [2.0]], requires_grad=True)
        beside = torch.zeros(4, 1, requires_grad=True)
        weights = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) * (1 + 9 * world.rank)
        later = beside * 1  # made first, so its gradient is looked at last
        ((world.interleave(mine) + later) * weights).sum().backward()
        expected = [[11.0], [33.0]] if world.rank == 0 else [[22.0], [44.0]]
        assert mine.grad.tolist() == expected, mine.grad
        assert torch.equal(beside.grad, weights), beside.grad
        """,
    )


def test_two_processes_have_the_contrastive_gradient_of_one_with_twice_the_batch(tmp_path):
    """Loss and all gradients, with one micro-batch and several, with dropout and loss-aware weights."""
    run_ranks_of(
        2,
        f"""
        from clip_making import make_batch, make_task, with_draws
        task = make_task(world=world, schedule_sampler="loss-second-moment")
        task.observe({{"t": torch.arange(8).repeat(10), "unweighted_loss": 1.0 + torch.arange(80) % 8}})
        trainee = Trainee(task, OptimConfig(), "fp32", world)
        found = []
        for size in (4, 1, 3):
            task.zero_grad()
            pieces = with_draws(make_batch(range(world.rank, 8, 2)).split(size))
            (values,) = task.backward(pieces, trainee._forward(""), 1.0)
            gradients = {{name: p.grad.clone() for name, p in task.model.named_parameters()}}
            found.append((world.interleave(values["loss"]), world.interleave(values["t"]), gradients))
        if world.is_main:
            torch.save(found, {str(tmp_path / "found.pt")!r})
        """,
    )
    task = make_task(schedule_sampler="loss-second-moment")
    task.observe({"t": torch.arange(8).repeat(10), "unweighted_loss": 1.0 + torch.arange(80) % 8})
    pieces = with_draws([make_batch(range(8))])
    (values,) = task.backward(pieces, lambda batch, draw, sync: task(batch, draw), 1.0)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == 3
    for loss, t, gradients in found:
        torch.testing.assert_close(loss, values["loss"], rtol=1e-5, atol=0)
        assert torch.equal(t, values["t"])
        for name, parameter in task.model.named_parameters():
            gap = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert gap < 1e-5, (name, gap)


def test_ranks_without_a_meeting_point_are_refused(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("left without the reason"))
    with pytest.raises(InputError, match="not MASTER_ADDR and MASTER_PORT"), launch(DistributedConfig(device="cpu")):
        pass


def test_what_is_printed_holds_no_secrets(capsys):
    url = "https://host/a.pt?sig=abc"
    World(ProcessInfo("single"), torch.device("cpu")).print("Starting from", url, 3)
    _report(RuntimeError(f"no answer from {url}"))  # with a traceback
    out, err = capsys.readouterr()
    assert out == "Starting from https://host/a.pt?*** 3\n"
    assert "no answer from https://host/a.pt?***" in err and "abc" not in err
