"""Trainees on several processes: replicated or sharded parameters, one or two optimizers, shared initial values."""

import torch
from ranks import run_ranks_of

from diff_dalle.distributed.parallel import build_shared
from diff_dalle.distributed.world import ALONE


def test_two_optimizers_on_two_processes_update_as_on_one(tmp_path):
    """Each optimizer exchanges the gradients of its own parameters only."""
    run_ranks_of(
        2,
        """
        from toy import TwoOptimizers

        CONFIGS = {"": CONFIG, "critic": OptimConfig(lr=3e-2, ema_rate=())}

        def pieces(positions, step):
            index = torch.tensor(list(positions)) + 100 * step
            batch = Batch(Draw(99, index).normal("image", (3, 2, 2)), Conditioning(), index)
            return [(piece, Draw(0, piece.index)) for piece in batch.split(2)]

        def main():
            tasks = [TwoOptimizers(), TwoOptimizers()]
            worlds = [World(SINGLE, torch.device("cpu")), world]
            for task, each in zip(tasks, worlds):
                task.model[1] = nn.LayerNorm(4)  # the statistics of a batch norm are each rank's own
                trainee = Trainee(task, CONFIGS, "fp32", each)
                for step in range(3):
                    trainee.update(pieces(range(each.rank, 8, each.size), step), step)
            for (name, a), b in zip(tasks[0].named_parameters(), tasks[1].parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
        main()
    """,
    )


def test_the_norm_of_sharded_gradients_is_that_of_the_whole(tmp_path):
    """On every rank a plain tensor: a norm that stays sharded would be each rank's own."""
    out = run_ranks_of(
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        from diff_dalle.distributed.parallel import total_norm

        def main():
            mesh = init_device_mesh("cpu", (2,))
            whole = [torch.arange(1.0, 9.0), torch.full((4, 2), 3.0)]
            shards = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
            norm = total_norm(shards)
            assert not isinstance(norm, DTensor), type(norm)
            expected = torch.cat([tensor.flatten() for tensor in whole]).norm()
            torch.testing.assert_close(norm, expected)
            world.print("fine")
        main()
    """,
    )
    assert "fine" in out


def test_ranks_receive_the_initial_values_of_the_first(tmp_path):
    """Only rank 0 initializes; a rank with another seed, or none, has the same network."""
    out = run_ranks_of(
        2,
        """
        def build():
            built.append(torch.empty(()).device.type)
            torch.manual_seed(world.rank)
            return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        built = []

        def main():
            network = build_shared(build, world)
            values = torch.cat([value.flatten().float() for value in network.state_dict().values()])
            everyone = world.gather(values)
            torch.manual_seed(0)
            assert torch.equal(everyone[0], everyone[1]) and torch.equal(network[0].weight, nn.Linear(3, 3).weight)
            assert world.gather(built) == [["cpu"], ["meta"]]
            world.print("fine")
        main()
    """,
    )
    assert "fine" in out


def test_every_rank_runs_as_many_forward_passes_in_evaluation(tmp_path):
    """Three blocks on two ranks: the fourth pass is made and not counted, so that collectives inside would meet."""
    out = run_ranks_of(
        2,
        """
        from toy import ListTracker, ToyData, ToyTask
        from diff_dalle.checkpoints.checkpoint import Identity
        from diff_dalle.checkpoints.run_folder import RunFolder
        from diff_dalle.training.loop import TrainLoop
        from diff_dalle.training.settings import TrainingConfig

        class Counting(ToyTask):
            passes = 0

            def held_out(self, batch, draw):
                self.passes += 1
                return self.losses(batch, draw)

        def main():
            found = []
            for each in (World(SINGLE, torch.device("cpu")), world):
                torch.manual_seed(0)
                task = Counting()
                trainee = Trainee(task, OptimConfig(), "fp32", each)
                config = TrainingConfig(eval_samples=24)
                folder = RunFolder(Identity("toy", {}), path="unused")
                loop = TrainLoop(config, [trainee], ToyData(8), folder, each, ToyData(8))
                found.append((task, loop.evaluate()[""]))
            (_, alone), (task, together) = found
            assert all(abs(together[name] - value) < 1e-6 * abs(value) + 1e-9 for name, value in alone.items())
            assert world.gather(task.passes) == [2, 2]
            world.print("fine")
        main()
    """,
    )
    assert "fine" in out


LOOPS = """
        import json, os, signal
        from toy import ListTracker, ToyData, ToyTask
        from diff_dalle.checkpoints.checkpoint import Identity
        from diff_dalle.checkpoints.run_folder import RunFolder, read_run
        from diff_dalle.distributed.launch import JobEnd
        from diff_dalle.config import InputError
        from diff_dalle.training.loop import TrainLoop
        from diff_dalle.training.settings import TrainingConfig

        def make_loop(world, folder, data=None, task=None, **settings):
            torch.manual_seed(0)
            os.makedirs(folder, exist_ok=True)
            trainee = Trainee(task or ToyTask(), OptimConfig(lr=1e-2), "fp32", world)
            data = data or ToyData(8, world.rank, world.size)
            config = TrainingConfig(**{"batch_size": 8, "iterations": 10, "save_interval": 1000, **settings})
            return TrainLoop(config, [trainee], data, RunFolder(Identity("toy", {}), path=folder), world)

        class On(ToyData):
            \"\"\"Calls ``event`` before the batch number ``at`` of this rank.\"\"\"
            def __init__(self, world, at, event):
                super().__init__(8, world.rank, world.size)
                self.at, self.event = at, event
            def batches(self, position, should_stop=None):
                for i, batch in enumerate(super().batches(position)):
                    if i == self.at:
                        self.event()
                    yield batch
"""


def test_what_ends_one_rank_ends_all_at_the_same_step_after_a_checkpoint(tmp_path):
    out = run_ranks_of(
        2,
        LOOPS
        + f"""
        def fail():
            raise InputError("the shard is gone")

        def main():
            def ending(name, data=None, tracker=None):
                loop = make_loop(world, {str(tmp_path)!r} + "/" + name, data)
                try:
                    loop.run(tracker or ListTracker())
                except (InputError, JobEnd) as error:
                    how = type(error).__name__, str(error)
                world.barrier()
                saved = read_run({str(tmp_path)!r} + "/" + name).checkpoints[-1].step
                return world.gather((loop.step, saved, *how))

            mine = On(world, 3, fail) if world.rank == 1 else None
            found = ending("data", mine)
            assert found[0] == (3, 3, "InputError", "rank 1: the shard is gone"), found
            assert found[1] == (3, 3, "InputError", "the shard is gone"), found

            class Full(ListTracker):
                def progress(self, step):
                    if step == 4:
                        fail()
            found = ending("log", tracker=Full() if world.is_main else None)
            assert found[0] == (5, 5, "InputError", "the shard is gone"), found
            assert found[1] == (5, 5, "InputError", "the shard is gone"), found

            mine = On(world, 3, lambda: os.kill(os.getpid(), signal.SIGUSR1)) if world.rank == 1 else None
            found = ending("signal", mine)
            assert found[0] == found[1] == (3, 3, "JobEnd", str(128 + signal.SIGUSR1)), found
            world.print("fine")
        main()
    """,
    )
    assert "fine" in out


def test_all_ranks_skip_the_step_that_is_not_finite_on_one(tmp_path):
    """In the data, in the loss, and in one gradient of one rank, before and after the exchange of gradients: both end
    with the weights of a run that did not take this step, and write it down."""
    out = run_ranks_of(
        2,
        LOOPS
        + f"""
        def in_the_data(loop, batch):
            batch.images[0, 0, 0, 0] = torch.inf

        def in_the_loss(loop, batch):
            loop.trainees[0].task.poison = set(batch.index[:1].tolist())

        def in_the_loss_alone(loop, batch):
            task = loop.trainees[0].task
            losses = task.losses
            def infinite(batch, draw):
                task.losses = losses
                values = losses(batch, draw)
                return values | {{"loss": values["loss"] + torch.inf}}  # its gradient is finite
            task.losses = infinite

        def in_a_gradient(loop, batch):
            parameter = loop.trainees[0].task.model[0].weight
            handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * torch.nan)[1])

        def after_the_exchange(loop, batch):
            optimization = loop.trainees[0].optimizations[""]
            finish = optimization.finish
            def broken(losses):
                optimization.finish = finish
                optimization.parameters[0].grad[0] = torch.inf
                return finish(losses)
            optimization.finish = broken

        def main():
            for inject in (in_the_data, in_the_loss, in_the_loss_alone, in_a_gradient, after_the_exchange):
                folder = {str(tmp_path)!r} + "/" + inject.__name__
                loop, clean = make_loop(world, folder), make_loop(world, folder + "_clean")
                for step, batch in zip(range(3), loop.data.batches(0)):
                    if step == 1:
                        if world.rank == 1:
                            inject(loop, batch)
                    else:
                        clean.step, clean.samples = step, 16 * step
                        clean.update(batch)
                    loop.update(batch)
                loop.save()
                values = [torch.cat([p.detach().flatten() for p in each.trainees[0].task.model.parameters()])
                          for each in (loop, clean)]
                assert torch.equal(*values), inject
                assert torch.equal(*world.gather(values[0])), inject
                if world.is_main:
                    (line,) = map(json.loads, open(folder + "/flight.jsonl"))
                    assert line["step"] == 2, line
                    assert inject in (in_the_loss_alone, after_the_exchange) or line["grad_norm"] == "nan", line
                    assert [each["position"] for each in line["ranks"]] == [
                        list(range(16 + rank, 32, 2)) for rank in (0, 1)]
            world.print("fine")
        main()
    """,
    )
    assert "fine" in out


def test_builds_are_left_alone_on_one_process():
    layer = torch.nn.Linear(2, 2)
    assert build_shared(lambda: layer, ALONE) is layer


def test_four_processes_resume_exactly():
    """The exchange sums in the same order in a process that begins and in one that has run: from three ranks on, the
    order changes the rounding."""
    body = """
        import copy

        def weights(trainee):
            return torch.cat([p.detach().flatten() for p in trainee.task.model.parameters()])

        def train(trainee, world, steps):
            for step in steps:
                trainee.update(make_pieces(range(world.rank, 8, world.size), step), step)

        def main():
            whole = Trainee(make_task(make_generator(image_size=8, channel_mult=(1,))), CONFIG, "fp32", world)
            train(whole, world, range(1))
            state = copy.deepcopy((whole.task.state_dict(), whole.optimizations[""].state()))
            train(whole, world, range(1, 3))
            resumed = Trainee(make_task(make_generator(image_size=8, channel_mult=(1,))), CONFIG, "fp32", world)
            resumed.task.load_state_dict(state[0])
            resumed.optimizations[""].load_state(state[1])
            train(resumed, world, range(1, 3))
            assert torch.equal(weights(resumed), weights(whole)), (weights(resumed) - weights(whole)).abs().max()

        main()
        """
    run_ranks_of(4, body)


# ------------------------------------------------------------------------------------------------------------- metrics


BODY = """
from eval_making import EVERY, N, chunks, pair
from diff_dalle.config import from_dict
from diff_dalle.distributed.world import ALONE
from diff_dalle.config import InputError
from diff_dalle.evaluation.generated import GeneratedMetrics
from diff_dalle.evaluation.generated_config import GeneratedMetricsConfig

config = from_dict(GeneratedMetricsConfig, {"n_evaluation_samples": N, **EVERY})
parts = chunks(*pair(), 8)
expected = GeneratedMetrics(config, ALONE).measure(parts, N)
for mine in (parts[world.rank :: 2], parts[:-1] if world.rank else parts[1:], [] if world.rank else parts):
    found = GeneratedMetrics(config, world).measure(mine, N)
    assert found == expected, (found, expected)
broken = [(parts[0][0], parts[0][1] / torch.zeros(1), parts[0][2])]
try:
    GeneratedMetrics(config, world).measure(broken if world.rank else parts, N)
    raise SystemExit("no error")
except InputError as error:
    assert "8 generated images of 8 have values that are not finite" in str(error), error
"""


def test_values_of_two_processes_are_those_of_one():
    """Of unequal numbers of chunks, of chunks that both have, and of a process that has none: equal to the last bit.
    What one cannot measure is an error of both."""
    run_ranks_of(2, BODY)
