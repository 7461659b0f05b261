"""The number of streams follows the nodes once, when a run starts."""

import json
from dataclasses import replace

import pytest
import torch

from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.record import CheckpointSet
from diff_dalle.checkpoints.run_folder import RunFolder, read_run
from diff_dalle.config import to_dict
from diff_dalle.data.loader import DataConfig
from diff_dalle.distributed.world import ProcessInfo, World
from diff_dalle.recipes import recipe as recipes
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.train import with_streams


def world_of(nodes: int) -> World:
    world = World(ProcessInfo("torchrun", 0, nodes), torch.device("cpu"), range(nodes))
    world.broadcast = lambda value=None: value
    return world


def started(folder, run: GeneratorRun) -> str:
    checkpoints = [CheckpointSet(1, 8, {"model": "model000001.pt"})]
    RunFolder(Identity("generator", to_dict(run), None), checkpoints, path=str(folder)).write_record()
    return str(folder)


@pytest.mark.parametrize(("nodes", "streams"), [(1, 8), (2, 8), (3, 9), (8, 8), (12, 12)])
def test_a_run_keeps_the_streams_it_started_with(tmp_path, capsys, nodes, streams):
    recipe = with_streams(GeneratorRun().recipe(), None, world_of(nodes))
    run = recipe.settings
    assert recipe.data.streams == run.data.streams == streams and not capsys.readouterr().out
    logdir = started(tmp_path, run)
    assert json.loads((tmp_path / "run.json").read_text())["config"]["data"]["streams"] == streams
    for later in (1, 4, 5):
        assert with_streams(GeneratorRun().recipe(), read_run(logdir), world_of(later)).data.streams == streams
        said = f"the {streams} streams of this run are no multiple of its {later} nodes" in capsys.readouterr().out
        assert said == (streams % later > 0)


def test_streams_that_are_given_are_used(tmp_path):
    given = replace(GeneratorRun(), data=DataConfig(streams=3))
    assert with_streams(given.recipe(), None, world_of(2)).data.streams == 3


def test_each_process_reads_the_positions_of_its_slot(tmp_path, monkeypatch):
    """And one lists the shards for all."""
    asked = []
    monkeypatch.setattr(recipes, "Loader", lambda *args, **options: asked.append(options))
    run = replace(GeneratorRun(), data=DataConfig(data_dir=(str(tmp_path),)))
    for rank in range(4):
        world = World(ProcessInfo("torchrun", rank, 4), torch.device("cpu"), [0, 0, 1, 1])
        assert run.recipe().open(world).both_loaders
        assert asked[-1]["world"] is world
    assert [options["rank"] for options in asked] == [0, 2, 1, 3] and asked[0]["world_size"] == 4
