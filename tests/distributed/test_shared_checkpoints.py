"""Several ranks resume: one of them reads the files, all of them get the same values."""

from ranks import run_ranks_of

BODY = """
import os
from toy import ListTracker, ToyData, TwoOptimizers
from diff_dalle.checkpoints import checkpoint, run_folder
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.distributed.parallel import place
from diff_dalle.training import restoring
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.settings import TrainingConfig

FOLDER = {folder!r}
reads = []

def load_file(path, *roles, **options):
    reads.append(path)
    return checkpoint.load_file(path, *roles, **options)

run_folder.load_file = restoring.load_file = load_file

def make_loop(world, folder, seed=0, **settings):
    defaults = {{"batch_size": 4, "iterations": 4, "save_interval": 2, "log_interval": 4, "precision": "fp32"}}
    config = TrainingConfig(**{{**defaults, **settings}})
    folder = world.broadcast(open_run(folder, Identity("toy", {{}}), OptimConfig) if world.is_main else None)
    task = TwoOptimizers()
    with torch.no_grad():  # what is not loaded differs between the ranks
        for parameter in task.parameters():
            parameter.add_(world.rank + seed)
    task.model.to(memory_format=torch.channels_last)
    trainee = Trainee(task, OptimConfig(lr=1e-2, ema_rate=(0.5, 0.9)), "fp32", world)
    data = ToyData(4, world.rank, world.size)
    return TrainLoop(config, [trainee], data, folder, world)

def values(loop):
    trainee, found = loop.trainees[0], []
    def add(value):
        if isinstance(value, torch.Tensor):
            found.append(value.detach().double().flatten())
        elif isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                add(item)
    add(trainee.states())
    return torch.cat(found)

def check_tensors(world):
    # Every layout and type.
    made = [
        torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last), torch.arange(6).view(2, 3).T,
        torch.tensor([True, False]), torch.tensor(2.5), torch.zeros(0, 3), torch.ones(3, dtype=torch.bfloat16),
    ]
    own = made if world.is_main else [tensor.clone().zero_() for tensor in made]
    for target, whole in zip(own, made):
        place(target, whole if world.is_main else None, world)
    assert all(torch.equal(*pair) for pair in zip(own, made)), own

def main():
    check_tensors(world)
    loop = make_loop(world, FOLDER)
    loop.run(ListTracker())
    saved = world.broadcast(values(loop))  # batch norm differs between ranks
    world.barrier()

    resumed = make_loop(world, FOLDER, seed=5)
    assert (resumed.step, resumed.samples) == (4, 32) and torch.equal(values(resumed), saved)
    assert world.gather(len(reads)) == [4, 0], world.gather(reads)

    next_run = make_loop(world, FOLDER + "/next", resume_checkpoint=FOLDER + "/model000004.pt")
    assert torch.equal(values(next_run), saved) and world.gather(len(reads))[1] == 0
    fresh = make_loop(world, FOLDER + "/fresh", init_checkpoint=(FOLDER + "/ema_0.9_000004.pt",))
    assert len(set(world.gather(fresh.trainees[0].task.model[0].weight.sum().item()))) == 1
    assert world.gather(len(reads))[1] == 0

    if world.is_main:
        os.truncate(FOLDER + "/opt000004.pt", 100)
    world.barrier()
    assert world.gather(make_loop(world, FOLDER).step) == [2, 2]
    assert world.gather(len(reads))[1] == 0
    world.print("fine")
main()
run_folder.load_file = restoring.load_file = checkpoint.load_file
"""


def test_rank_0_reads_and_every_rank_resumes(tmp_path):
    """Weights, averages, both optimizers and their modules; from the log directory, from another, from weights; and
    all ranks fall back to the same checkpoint."""
    out = run_ranks_of(2, BODY.format(folder=str(tmp_path / "run")))
    assert "fine" in out and "falling back to that of step 2" in out
