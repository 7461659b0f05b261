"""The tables of the decoder trainer's document: their defaults are ours, and a file of all their options trains."""

import ast
import json

import pytest
from decoder_file_making import UNET, make_world
from document_reading import options, sections
from script_running import run

from diff_dalle.commands.command_line import parse
from diff_dalle.recipes.decoder import DecoderRun

TABLES = {name.rpartition("/")[2]: options(text) for name, text in sections("decoder_trainer.md").items()}
# The sizes of the documented defaults are for millions of pictures.
SMALL = {
    "decoder": {"unets": [UNET | {"dim_mults": [1, 2]}], "image_sizes": [8], "image_size": 7, "timesteps": 4},
    "data": {"num_workers": 0, "batch_size": 4, "shard_width": 2, "index_width": 2, "end_shard": 3},
    "train": {"epochs": 1, "save_every_n_samples": 12, "device": "cpu"},
    "evaluate": {"n_evaluation_samples": 2},
}


def value(text):
    """A default as the tables write it."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def defaults(table):
    return {name: value(text) for name, text in TABLES[table].items() if text != "N/A"}


def documented(folder, world):
    """Every option of the tables, with its documented default where it has one."""
    tracker = defaults("Tracker") | {
        "data_path": str(folder / "run"),
        "log": {"log_type": "console", **{name: defaults("Logging")[name] for name in ("resume", "auto_resume")}},
        "save": [{"save_to": "local", **{n: v for n, v in defaults("Saving").items() if n.startswith("save")}}],
    }
    tracker["save"][0]["save_latest_to"] = str(folder / "latest.pth")
    return {
        "decoder": defaults("Decoder") | SMALL["decoder"],
        "data": defaults("Data") | {"webdataset_base_url": world} | SMALL["data"],
        "train": defaults("Train") | SMALL["train"],
        "evaluate": defaults("Evaluate") | SMALL["evaluate"],
        "tracker": tracker,
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("shards"))


def test_a_file_of_every_documented_option_trains(tmp_path, world, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decoder.json").write_text(json.dumps(documented(tmp_path, world)))
    result = run("train_decoder.py", "--config_file", tmp_path / "decoder.json", "--threads", 1)
    assert (tmp_path / "latest.pth").exists(), result.stdout


def test_the_documented_defaults_are_ours(tmp_path, world):
    """A file of the required options alone is one of all options."""
    short, long = documented(tmp_path, world), documented(tmp_path, world)
    for section in ("decoder", "data", "train", "evaluate", "tracker"):
        table = defaults(section.title())
        small = SMALL.get(section, {})
        for name in table:
            if name not in small and name not in ("data_path",):
                del short[section][name]
    runs = []
    for name, file in (("short", short), ("long", long)):
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
        runs.append(parse(DecoderRun, ["--config_file", str(tmp_path / f"{name}.json")]))
    assert runs[0] == runs[1]
