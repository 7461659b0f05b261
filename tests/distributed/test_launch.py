"""Launcher detection, and jobs of two processes that must end together."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from clip_making import make_batch, make_task, with_draws

from diff_dalle.distributed.devices import pick_device
from diff_dalle.distributed.launch import DistributedConfig, _report, detect, launch
from diff_dalle.distributed.world import ProcessInfo, Vote, World
from diff_dalle.errors import InputError, quantity

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


def test_vote_lags_by_one_call():
    vote = Vote(World(ProcessInfo("single"), torch.device("cpu")))
    assert [vote.cast(yes) for yes in (False, True, False, False)] == [False, False, True, False]


def test_missing_device_is_named():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="--device"), launch(DistributedConfig(device="cuda")):
        pass


def test_one_gpu_per_process_or_an_error(monkeypatch):
    def picked(count, *place):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return pick_device("cuda", ProcessInfo(*place))

    assert picked(8, "torchrun", 13, 16, 5, 8).index == 5
    assert picked(1, "slurm", 13, 16, 5, 8).index == 0  # srun --gpus-per-task 1
    with pytest.raises(InputError, match="8 processes were started on a machine with 1 GPU"):
        picked(1, "torchrun", 13, 16, 5, 8)


def test_quantity():
    assert [quantity(1, "process"), quantity(2, "process"), quantity(1200, "sample")] == [
        "1 process",
        "2 processes",
        "1,200 samples",
    ]


LAUNCHERS = {
    "mpiexec": [os.path.join(BIN, "mpiexec"), "-n", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}
PREAMBLE = """
import torch
from diff_dalle.distributed.launch import DistributedConfig, launch, run_script
from diff_dalle.distributed.parallel import Replicas
from diff_dalle.distributed.world import Vote
from diff_dalle.errors import InputError
"""


def run_job(launcher, tmp_path, body):
    script = tmp_path / "job.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "SLURM_"))}
    return subprocess.run(
        [*LAUNCHERS[launcher], str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([TESTS, *sys.path])},
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_agree(launcher, tmp_path):
    result = run_job(
        launcher,
        tmp_path,
        """
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=60)) as world:
                assert world.size == 2
                assert world.broadcast(world.rank) == 0
                assert world.gather(world.rank * 10) == [0, 10]
                mine = torch.tensor([world.rank, world.rank + 2])
                assert world.interleave(mine).tolist() == [0, 1, 2, 3]
                vote = Vote(world)
                votes = [vote.cast(world.rank == 1 and i == 0) for i in range(3)]
                assert votes == [False, True, False], votes
                layer = torch.nn.Linear(1, 1, bias=False)
                replicas = Replicas(layer, layer.parameters(), world)
                replicas(torch.tensor([[1.0 + world.rank]]), sync=True).sum().backward()
                assert layer.weight.grad.item() == 1.5
                world.print("fine")
        run_script(main)
    """,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("fine") == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_without_its_device_is_named(launcher, tmp_path):
    result = run_job(
        launcher,
        tmp_path,
        """
        from diff_dalle.distributed.launch import detect
        def main():
            torch.cuda.device_count = lambda: 0
            device = "cuda" if detect().rank == 1 else "cpu"
            with launch(DistributedConfig(device=device, start_timeout=60)):
                pass
        run_script(main)
    """,
    )
    assert result.returncode != 0 and "rank 1: --device cuda" in result.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "failure", ["raise InputError('the flag is wrong')", "raise RuntimeError('broken')", "sys.exit(3)"]
)
def test_one_failing_rank_ends_the_job_with_its_reason(launcher, failure, tmp_path):
    """The other rank waits in a collective; with a plain exception in one rank MPI would wait forever."""
    result = run_job(
        launcher,
        tmp_path,
        f"""
        import sys
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=60)) as world:
                if world.rank == 1:
                    {failure}
                world.barrier()
        run_script(main)
    """,
    )
    assert result.returncode != 0
    reason = {"Inp": "the flag is wrong", "Run": "RuntimeError: broken", "exi": "status 3"}
    assert "rank 1: " in result.stderr
    assert any(text in result.stderr for key, text in reason.items() if key in failure)


def test_a_job_that_ends_while_its_store_is_polled_succeeds(tmp_path):
    """A thread that returns from the store's C++ code while the interpreter shuts down would abort the process."""
    result = run_job(
        "mpiexec",
        tmp_path,
        """
        import time
        from diff_dalle.distributed import launch as module

        class SlowStore:
            def __init__(self, store):
                self.store = store
            def check(self, keys):
                end = time.monotonic() + 2.0
                while time.monotonic() < end:
                    failed = self.store.check(keys)
                return failed

        def main():
            connect = module._connect_again
            module._connect_again = lambda *address: SlowStore(connect(*address))
            with launch(DistributedConfig(device="cpu", start_timeout=60)):
                time.sleep(1.5)  # the polling starts after a second
        run_script(main)
    """,
    )
    assert result.returncode == 0, result.stderr


def test_gradients_come_back_to_the_rank_that_sent_the_values(tmp_path):
    """Summed over the ranks that used them; gradients of other tensors in the sum are unchanged."""
    result = run_job(
        "torchrun",
        tmp_path,
        """
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=60)) as world:
                mine = torch.tensor([[1.0], [2.0]], requires_grad=True)
                beside = torch.zeros(4, 1, requires_grad=True)
                weights = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) * (1 + 9 * world.rank)
                later = beside * 1  # made first, so its gradient is looked at last
                ((world.interleave(mine) + later) * weights).sum().backward()
                expected = [[11.0], [33.0]] if world.rank == 0 else [[22.0], [44.0]]
                assert mine.grad.tolist() == expected, mine.grad
                assert torch.equal(beside.grad, weights), beside.grad
        run_script(main)
    """,
    )
    assert result.returncode == 0, result.stderr


def test_two_processes_have_the_contrastive_gradient_of_one_with_twice_the_batch(tmp_path):
    """Loss and all gradients, with one micro-batch and several, with dropout and loss-aware weights."""
    result = run_job(
        "mpiexec",
        tmp_path,
        f"""
        from clip_making import make_batch, make_task, with_draws
        from diff_dalle.training.optim import OptimConfig
        from diff_dalle.training.trainee import Trainee
        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=60)) as world:
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
        run_script(main)
    """,
    )
    assert result.returncode == 0, result.stderr
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
