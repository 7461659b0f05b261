"""The presets in the package, and the tables of kinds."""

from pathlib import Path

import pytest

from diff_dalle.checkpoints.kinds import KINDS
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.info import RUNS
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.sources import TRAINING_SCRIPTS, preset_names, preset_text, presets_of, read_preset
from diff_dalle.errors import InputError

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_their_kind_and_where_they_come_from(name):
    text = preset_text(name)
    assert "# Source:" in text and "# Expect:" in text
    kind = read_preset(name).kind
    assert kind in RUNS and name in presets_of(kind)
    parse(RUNS[kind], ["--preset", name])
    for other in RUNS.keys() - {kind}:
        with pytest.raises(InputError, match=f"use it with {TRAINING_SCRIPTS[kind]}"):
            parse(RUNS[other], ["--preset", name])


def test_every_kind_has_a_run_a_script_and_a_network():
    assert RUNS.keys() == TRAINING_SCRIPTS.keys() == KINDS.keys()
    assert all((ROOT / script).is_file() for script in TRAINING_SCRIPTS.values())
    assert all(run.kind == kind for kind, run in RUNS.items())


def test_presets_of_training_are_refused_by_other_commands():
    with pytest.raises(InputError, match=r"preset classifier_64 .* scripts/train_classifier\.py"):
        parse(SampleRun, ["--model_path", "ema.pt", "--preset", "classifier_64"])
