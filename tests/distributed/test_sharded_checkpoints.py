"""A sharded run goes on in any arrangement of processes, with the same bits, and so does any other under sharding."""

import os

from sharded_jobs import SHARDED
from test_parallel import run_ranks_of

RUN = """
def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        loop = make_loop(world, {folder!r}, {mode!r}, {settings})
        loop.run(ListTracker())
        found = digest(loop)
        assert len(set(world.gather(found))) == 1
        world.print("digest", found)
run_script(main)
"""


def digest_of(tmp_path, size, mode, folder="run", **settings):
    """Step and hash of the state of a run that goes on in a folder."""
    given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    body = SHARDED + RUN.format(folder=str(tmp_path / folder), mode=mode, settings=given)
    out = run_ranks_of(tmp_path, body, size)
    return next(line for line in out.splitlines() if line.startswith("digest"))


def test_a_checkpoint_has_the_same_bits_however_it_is_loaded(tmp_path):
    """Saved by two ranks that share the weights; loaded by four, by four in two groups, by two with all weights each,
    and by one; and by two again from the ordinary file that this one saves."""
    saved = digest_of(tmp_path, 2, "fsdp")
    assert saved.startswith("digest 3 ") and sorted(os.listdir(tmp_path / "run" / "sharded000003")) == [
        "index.pt", "rank00000.bin", "rank00001.bin",
    ]  # fmt: skip
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".pt")]
    for size, mode in ((4, "fsdp"), (2, "ddp"), (1, "ddp")):
        assert digest_of(tmp_path, size, mode, seed=5) == saved, (size, mode)
