"""The presets in the package, and the tables of kinds."""

from pathlib import Path

import pytest

from diff_dalle.checkpoints.kinds import KINDS, TRAINING_COMMANDS, Training
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.info import parse_info
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.sources import preset_names, preset_text, presets_of, read_config, read_preset
from diff_dalle.config import InputError
from diff_dalle.recipes import generator

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_their_kind_and_where_they_come_from(name):
    text = preset_text(name)
    assert "# Source:" in text and "# Expect:" in text
    kind = read_preset(name).kind
    assert kind in TRAINING_COMMANDS and name in presets_of(kind)
    own = TRAINING_COMMANDS[kind]
    base = ["--model_path", "base.pt"] if kind == "controlnet" else []  # which no preset can know
    parse(own.config_class, ["--preset", name, *base])
    for other in TRAINING_COMMANDS.keys() - {kind}:
        with pytest.raises(InputError, match=f"use it with {own.script}"):
            parse(TRAINING_COMMANDS[other].config_class, ["--preset", name])


def test_every_kind_has_a_command_a_script_and_a_network():
    trained = {kind.removesuffix("_lora") for kind in TRAINING_COMMANDS}
    assert trained == KINDS.keys() - {
        "noisy_classifier",
        "vit_clip",
    }  # which come from other projects' checkpoints only
    for kind, command in TRAINING_COMMANDS.items():
        assert (ROOT / command.script).is_file() and command.config_class.kind == kind


def test_one_line_registers_a_training_command(monkeypatch, tmp_path):
    """Its config files are read, and ``info.py`` accepts its kind."""
    decoder = type("DecoderRun", (generator.GeneratorRun,), {"kind": "decoder"})
    monkeypatch.setattr(generator, "DecoderRun", decoder, raising=False)
    new = Training("scripts/train_decoder.py", "generator.DecoderRun")
    monkeypatch.setitem(TRAINING_COMMANDS, "decoder", new)
    monkeypatch.setitem(KINDS, "decoder", KINDS["generator"])
    (tmp_path / "run.yaml").write_text("kind: decoder\n")
    assert read_config(str(tmp_path / "run.yaml")).kind == "decoder"
    with pytest.raises(InputError, match=r"use it with scripts/train_decoder\.py"):
        parse(SampleRun, ["--model_path", "ema.pt", "--config", str(tmp_path / "run.yaml")])
    assert type(parse_info(["--config", str(tmp_path / "run.yaml")])).__name__ == "DecoderRunInfo"


def read_named(name):
    return parse(TRAINING_COMMANDS[read_preset(name).kind].config_class, ["--preset", name])


@pytest.mark.parametrize("name", presets_of("stage_c_controlnet"))
def test_the_blocks_of_a_controlnet_are_of_the_stage_c_of_its_size(name):
    base = name.replace("controlnet", "stage_c")
    assert base in presets_of("stage_c")
    own, model = read_named(name).controlnet, read_named(base).model
    own.check_blocks(model)
    assert own.controlnet_blocks[-1] == len(model.residual_widths) - 1  # the last one too: it spans all levels


def test_an_empty_preset_is_none():
    """As of a shell variable that is not set."""
    own = TRAINING_COMMANDS["generator"].config_class
    flags = ["--data_dir", "shards"]
    assert parse(own, ["--preset", "", *flags]) == parse(own, flags)
