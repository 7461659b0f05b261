"""A sharded run goes on in any arrangement of processes, with the same bits, and so does any other under sharding."""

import json
import os
import signal

import torch
from forking import ends, start_ranks
from sharded_jobs import SHARDED
from test_parallel import PREAMBLE, run_ranks_of

from diff_dalle.checkpoints.bundle import restore_bundle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.shards import consolidate

RUNS = """
def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        for folder, mode, settings in {runs!r}:
            loop = make_loop(world, folder, mode, **settings)
            loop.run(ListTracker())
            found = digest(loop)
            assert len(set(world.gather(found))) == 1
            world.print("digest", found)
run_script(main)
"""


def digests_of(tmp_path, size, *runs):
    """For each (folder, mode, settings): step and hash of the state of a run that goes on in a folder."""
    given = [(str(tmp_path / folder), *run) for folder, *run in runs]
    out = run_ranks_of(tmp_path, SHARDED + RUNS.format(runs=given), size)
    found = [line for line in out.splitlines() if line.startswith("digest")]
    assert len(found) == len(runs), out
    return found


def test_a_checkpoint_has_the_same_bits_however_it_is_loaded(tmp_path):
    """Saved by two ranks that share the weights; loaded by two with all weights each, by four, by four in two groups,
    and by one; and by two again from the ordinary file that this one saves."""
    other = {"seed": 5}  # initial weights that the checkpoint replaces
    saved, loaded = digests_of(tmp_path, 2, ("run", "fsdp", {}), ("run", "ddp", other))
    assert saved.startswith("digest 3 ") and sorted(os.listdir(tmp_path / "run" / "sharded000003")) == [
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
    paths = consolidate(str(tmp_path / "run" / "sharded000003"), str(tmp_path / "run"))
    assert [os.path.basename(path) for path in paths] == ["model000003.pt", "ema_0.5_000003.pt", "opt000003.pt"]
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
class Held(Data):
    def batches_at(self, blocks):
        for block in blocks:
            ((batch, _),) = make_pieces(block, 0, 8)
            yield batch

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
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        settings = {{"save_interval": 1, "keep_checkpoints": 1, "backup_interval": 3, "iterations": 4}}
        settings |= {{"eval_interval": 2, "eval_samples": 8, "keep_best": True, "val_data_dir": ("x",)}}
        for folder, consolidate in {folders!r}.items():
            loop = make_loop(world, folder, "fsdp", consolidate=consolidate, **settings)
            loop.val_data = Held(world)
            loop.run(Reading(folder) if world.is_main else ListTracker())
            world.print("digest", digest(loop))
run_script(main)
"""


def test_folders_are_kept_dropped_and_consolidated_as_files_are(tmp_path):
    """The latest checkpoint and the backup stay, with the files that are made of them in the background or for savers;
    the best weights, a bundle and the model of a saver are ordinary files, and a bundle's run goes on."""
    folders = {str(tmp_path / "background"): True, str(tmp_path / "savers"): False}
    out = run_ranks_of(tmp_path, SHARDED + KEEPING.format(folders=folders), 2)
    saved = [line for line in out.splitlines() if line.startswith("digest")]
    for folder in folders:
        names = {f"{stem}00000{step}.pt" for step in (3, 4) for stem in ("model", "ema_0.5_", "opt")}
        found = {name for name in os.listdir(folder) if not name.startswith(("run.", "data-"))}
        assert found == names | {"best.pt", "sharded000003", "sharded000004"}
        best, latest = load_file(f"{folder}/best.pt"), load_file(f"{folder}/ema_0.5_000004.pt")
        assert best["role"] == "ema" and best["state"].keys() == latest["state"].keys()
        model = load_file(f"{folder}-model-4.pt")
        assert all(torch.equal(model["state"][name], value) for name, value in latest["state"].items())
        if best["step"] == 4:
            assert all(torch.equal(best["state"][name], value) for name, value in latest["state"].items())
        assert restore_bundle(f"{folder}-checkpoint-4.pt", f"{folder}-restored") == 4
    more = {"iterations": 4, "seed": 5}
    assert digests_of(tmp_path, 2, *((f"{folder}-restored", "fsdp", more) for folder in folders)) == saved


SLOW_DISK = """
import time
from diff_dalle.training import saving

def slow(path, out):
    time.sleep(0.5)  # a few updates, after which the folder would be dropped
    return written(path, out)

written, saving.consolidate = saving.consolidate, slow

def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        loop = make_loop(world, {folder!r}, "fsdp", consolidate=True, save_interval=1, keep_checkpoints=1)
        loop.run(ListTracker())
        assert not world.is_main or os.path.exists(os.path.join({folder!r}, "opt000003.pt"))
        world.print("fine")
run_script(main)
"""


def test_a_folder_stays_until_its_files_are_made(tmp_path):
    """Though the next checkpoint, which replaces it, is due before; the run ends with the files of the last."""
    assert "fine" in run_ranks_of(tmp_path, SHARDED + SLOW_DISK.format(folder=str(tmp_path / "run")), 2)


UNWRITTEN = """
from diff_dalle.training import saving
from diff_dalle.errors import InputError

def full(path, out):
    raise InputError(f"no space left for {{out}}")

def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        saving.consolidate = full
        loop = make_loop(world, {folder!r}, "fsdp", consolidate=True)
        try:
            loop.run(ListTracker())
        except InputError as error:
            found = world.gather(str(error))
        assert all("no space left" in text for text in found), found
        world.print("fine")
run_script(main)
"""


def test_what_the_background_cannot_write_ends_all_ranks_with_the_reason(tmp_path):
    """Also of the last checkpoint, which stays."""
    assert "fine" in run_ranks_of(tmp_path, SHARDED + UNWRITTEN.format(folder=str(tmp_path / "run")), 2)
    assert (tmp_path / "run" / "sharded000003" / "index.pt").exists()


FAILING = """
from diff_dalle import storage
from diff_dalle.errors import InputError

def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        loop = make_loop(world, {folder!r}, "fsdp", save_interval=1)
        written = storage.atomic_writer

        def full(path):
            if "rank00001" in path and "sharded000001" not in path:
                raise InputError(f"no space left for {{path}}")
            return written(path)

        storage.atomic_writer = full
        try:
            loop.run(ListTracker())
        except InputError as error:
            found = world.gather((loop.step, str(error)))
        assert found[0][0] == found[1][0], found
        assert found[0][1] == f"rank 1: {{found[1][1]}}" and "no space left" in found[1][1], found
        storage.atomic_writer = written
        again = make_loop(world, {folder!r}, "fsdp")
        assert again.step == 1
        world.print("fine")
run_script(main)
"""


def test_a_rank_that_cannot_write_ends_all_and_leaves_the_checkpoint_before(tmp_path):
    assert "fine" in run_ranks_of(tmp_path, SHARDED + FAILING.format(folder=str(tmp_path / "run")), 2)


DYING = """
import signal

class Dying(ListTracker):
    def progress(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        loop = make_loop(world, {folder!r}, "fsdp", iterations=1000)
        loop.run(Dying() if world.rank == 1 else ListTracker())
run_script(main)
"""


def test_a_killed_rank_ends_the_others_with_the_reason(tmp_path):
    """They wait for its share of the weights, with a time-out of half an hour; they end within 30 seconds."""
    script = tmp_path / "job.py"
    script.write_text(PREAMBLE + SHARDED + DYING.format(folder=str(tmp_path / "run")))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "SLURM_"))}
    first, killed, last = start_ranks([str(script)], {**env, "OMP_NUM_THREADS": "1"}, 3)
    assert ends([killed])[0][0] == -signal.SIGKILL
    for status, _, stderr in ends([first, last], timeout=30):
        assert status == 1 and "stops because rank 1 is gone" in stderr, (status, stderr)
