"""A sharded run goes on in any arrangement of processes, with the same bits, and so does any other under sharding; of
files that all share, one rank reads."""

import json
import os
import signal

import pytest
import torch
from forking import ends, start_ranks
from ranks import PREAMBLE, environment, run_ranks_of

from diff_dalle.checkpoints.bundle import restore_bundle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.shards import consolidate

RUNS = """
for folder, mode, settings in {runs!r}:
    loop = make_loop(world, folder, mode, **settings)
    loop.run(ListTracker())
    found = digest(loop)
    assert len(set(world.gather(found))) == 1
    world.print("digest", found)
"""


def digests_of(tmp_path, size, *runs):
    """For each (folder, mode, settings): step and hash of the state of a run that goes on in a folder."""
    given = [(str(tmp_path / folder), *run) for folder, *run in runs]
    out = run_ranks_of(size, RUNS.format(runs=given))
    found = [line for line in out.splitlines() if line.startswith("digest")]
    assert len(found) == len(runs), out
    return found


def test_a_checkpoint_has_the_same_bits_however_it_is_loaded(tmp_path):
    """Saved by two ranks that share the weights; loaded by two with all weights each, by four, by four in two groups,
    and by one; and by two again from the ordinary file that this one saves."""
    other = {"seed": 5}  # initial weights that the checkpoint replaces
    saved, loaded = digests_of(tmp_path, 2, ("run", "fsdp", {}), ("run", "ddp", other))
    assert saved.startswith("digest 2 ") and sorted(os.listdir(tmp_path / "run" / "sharded000002")) == [
        "index.pt", "rank00000.bin", "rank00001.bin",
    ]  # fmt: skip
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".pt")]
    print(f"\nsaved by fsdp on 2: {saved}")
    found = {"ddp on 2": loaded}
    found["fsdp on 4"], found["hsdp on 4"] = digests_of(tmp_path, 4, ("run", "fsdp", other), ("run", "hsdp", other))
    (found["ddp on 1"],) = digests_of(tmp_path, 1, ("run", "ddp", other))
    for name, each in found.items():
        print(f"loaded by {name}: {each}")
        assert each == saved, name
    paths = consolidate(str(tmp_path / "run" / "sharded000002"), str(tmp_path / "run"))
    assert [os.path.basename(path) for path in paths] == ["model000002.pt", "ema_0.5_000002.pt", "opt000002.pt"]
    record = tmp_path / "run" / "run.json"
    record.write_text(json.dumps({**(saved_record := json.loads(record.read_text())), "checkpoints": [
        {**entry, "folder": ""} for entry in saved_record["checkpoints"]
    ]}))  # fmt: skip
    assert digests_of(tmp_path, 2, ("run", "fsdp", other)) == [saved]


def test_weights_to_start_from_reach_every_share(tmp_path):
    """Of an ordinary file, without those that are excluded; the averages start from them too."""
    start = {"init_checkpoint": (str(tmp_path / "run" / "ema_0.5_000002.pt"),), "init_exclude": ("unet.out_conv.*",)}
    start |= {"iterations": 1, "seed": 5}
    digests_of(tmp_path, 1, ("run", "ddp", {"iterations": 2}), ("ddp", "ddp", start))
    digests_of(tmp_path, 2, ("fsdp", "fsdp", start))
    assert not consolidate(str(tmp_path / "fsdp" / "sharded000001"), str(tmp_path / "fsdp"))[3:]
    for name in ("model000001.pt", "ema_0.5_000001.pt"):
        own = load_file(str(tmp_path / "fsdp" / name))["state"]
        for key, value in load_file(str(tmp_path / "ddp" / name))["state"].items():
            torch.testing.assert_close(own[key], value, rtol=0, atol=2e-3)  # a step of AdamW: lr


KEEPING = """
class Reading(ListTracker):
    # Keeps what savers would, of the checkpoint that was just written.
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def saved(self, saved):
        for name, write in saved.forms.items():
            with open(f"{{self.folder}}-{{name}}-{{saved.step}}.pt", "wb") as file:
                write(file)

def main():
    settings = {{"save_interval": 1, "keep_checkpoints": 1, "backup_interval": 2, "iterations": 3}}
    settings |= {{"eval_interval": 2, "eval_samples": 8, "keep_best": True, "val_data_dir": ("x",)}}
    for folder, consolidate in {folders!r}.items():
        loop = make_loop(world, folder, "fsdp", consolidate=consolidate, **settings)
        loop.val_data = Data(world)
        loop.run(Reading(folder) if world.is_main else ListTracker())
        world.print("digest", digest(loop))
main()
"""


@pytest.mark.slow
def test_folders_are_kept_dropped_and_consolidated_as_files_are(tmp_path):
    """The latest checkpoint and the backup stay, with the files that are made of them in the background or for savers;
    the best weights, a bundle and the model of a saver are ordinary files, and a bundle's run goes on."""
    folders = {str(tmp_path / "background"): True, str(tmp_path / "savers"): False}
    out = run_ranks_of(2, KEEPING.format(folders=folders))
    saved = [line for line in out.splitlines() if line.startswith("digest")]
    for folder in folders:
        names = {f"{stem}00000{step}.pt" for step in (2, 3) for stem in ("model", "ema_0.5_", "opt")}
        found = {name for name in os.listdir(folder) if not name.startswith(("run.", "data-"))}
        assert found == names | {"best.pt", "sharded000002", "sharded000003"}
        best, latest = load_file(f"{folder}/best.pt"), load_file(f"{folder}/ema_0.5_000003.pt")
        assert best["role"] == "ema" and best["state"].keys() == latest["state"].keys()
        model = load_file(f"{folder}-model-3.pt")
        assert all(torch.equal(model["state"][name], value) for name, value in latest["state"].items())
        if best["step"] == 3:
            assert all(torch.equal(best["state"][name], value) for name, value in latest["state"].items())
        assert restore_bundle(f"{folder}-checkpoint-3.pt", f"{folder}-restored") == 3
    more = {"iterations": 3, "seed": 5}
    assert digests_of(tmp_path, 2, *((f"{folder}-restored", "fsdp", more) for folder in folders)) == saved


SLOW_DISK = """
import time
from diff_dalle.training import saving

def slow(path, out):
    time.sleep(0.5)  # a few updates, after which the folder would be dropped
    return written(path, out)

written = saving.consolidate
with mock.patch.object(saving, "consolidate", slow):
    make_loop(world, {folder!r}, consolidate=True, save_interval=1, keep_checkpoints=1).run(ListTracker())
assert not world.is_main or os.path.exists(os.path.join({folder!r}, "opt000002.pt"))
world.print("fine")
"""


def test_a_folder_stays_until_its_files_are_made(tmp_path):
    """Though the next checkpoint, which replaces it, is due before; the run ends with the files of the last."""
    assert "fine" in run_ranks_of(2, SLOW_DISK.format(folder=str(tmp_path / "run")))


UNWRITTEN = """
from diff_dalle.training import saving

def full(path, out):
    raise InputError(f"no space left for {{out}}")

with mock.patch.object(saving, "consolidate", full):
    try:
        make_loop(world, {folder!r}, consolidate=True).run(ListTracker())
    except InputError as error:
        found = world.gather(str(error))
assert all("no space left" in text for text in found), found
world.print("fine")
"""


def test_what_the_background_cannot_write_ends_all_ranks_with_the_reason(tmp_path):
    """Also of the last checkpoint, which stays."""
    assert "fine" in run_ranks_of(2, UNWRITTEN.format(folder=str(tmp_path / "run")))
    assert (tmp_path / "run" / "sharded000002" / "index.pt").exists()


FAILING = """
from diff_dalle import storage

written = storage.atomic_writer

def full(path):
    if "rank00001" in path and "sharded000001" not in path:
        raise InputError(f"no space left for {{path}}")
    return written(path)

loop = make_loop(world, {folder!r}, save_interval=1)
with mock.patch.object(storage, "atomic_writer", full):
    try:
        loop.run(ListTracker())
    except InputError as error:
        found = world.gather((loop.step, str(error)))
assert found[0][0] == found[1][0], found
assert found[0][1] == f"rank 1: {{found[1][1]}}" and "no space left" in found[1][1], found
assert make_loop(world, {folder!r}).step == 1
world.print("fine")
"""


def test_a_rank_that_cannot_write_ends_all_and_leaves_the_checkpoint_before(tmp_path):
    assert "fine" in run_ranks_of(2, FAILING.format(folder=str(tmp_path / "run")))


DYING = """
import signal

class Dying(ListTracker):
    def progress(self, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGKILL)

def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        make_loop(world, {folder!r}, iterations=1000).run(Dying() if world.rank == 1 else ListTracker())
run_script(main)
"""


def test_a_killed_rank_ends_the_others_with_the_reason(tmp_path):
    """They wait for its share of the weights, with a time-out of half an hour; they end within 30 seconds."""
    script = tmp_path / "job.py"
    script.write_text(PREAMBLE + DYING.format(folder=str(tmp_path / "run")))
    first, killed, last = start_ranks([str(script)], environment(), 3)
    assert ends([killed])[0][0] == -signal.SIGKILL
    for status, _, stderr in ends([first, last], timeout=30):
        assert status == 1 and "stops because rank 1 is gone" in stderr, (status, stderr)


# --------------------------------------------------------------------------------------------------- whole checkpoints


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
