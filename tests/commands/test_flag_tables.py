from dataclasses import dataclass

import pytest
from config_making import Cascade, Decoder, Run, Sampling, Training

from diff_dalle.commands.flag_names import by_name
from diff_dalle.commands.flag_tables import Command, command_page, flag_table
from diff_dalle.config import expectations, option, overrides, section

Checks = expectations(Sampling, "Checks")


@dataclass(frozen=True)
class Smoothing:
    """Smoothing"""

    radius: float = option(1.0, "pixels")


Given = overrides(Smoothing, "Given")


@dataclass(frozen=True)
class FastTraining(Training):
    """Fast training"""

    lr: float = option(1.0, "rate | speed")


@dataclass(frozen=True)
class Fast:
    training: FastTraining = section(FastTraining)
    decoder: Decoder = section(Decoder)
    checks: Checks = section(Checks)
    given: Given = section(Given)


@pytest.fixture(scope="module")
def page():
    commands = [
        Command("run.py", "Run it.", ["python scripts/run.py", "python scripts/run.py --flip"], {"": Run}),
        Command("fast.py", "Run fast.", [], {"a": Fast, "b": Cascade}),
    ]
    return command_page(commands)


def test_a_table_has_every_flag():
    table = flag_table(Run)
    assert all(f"| `--{name}` |" in table for name in by_name(Run))
    assert "**Network**" in table and "| `--lr` | `0.0003` | rate |" in table
    assert "kind (fixed_large, fixed_small, learned_range)" in table


def test_lists_of_sections_are_shown_as_paths():
    table = flag_table(Cascade)
    assert "| `--set decoder.unets.N` | 2 | U-Nets, by stage: a list of sections, N = 0, 1, … |" in table
    assert "| `--set decoder.unets.N.dim` | `128` | channels of the first level |" in table
    assert "**Sampling (flags with upsampler_)**" in table and "`--upsampler_eta`" in table
    assert "`--unets`" not in table


def test_every_command_has_description_examples_and_flags(page):
    text = page.split("## `run.py`")[1].split("## `fast.py`")[0]
    assert "Run it.\n\n```bash\npython scripts/run.py\npython scripts/run.py --flip\n```" in text
    assert "**Network**" in text and "`--num_channels`" in text
    assert "### `fast.py a`" in page and "### `fast.py b`" in page and "](#runpy)" in page


def test_shared_sections_are_listed_once(page):
    """A command that changes a default shows this flag only; a section under a prefix is not shared."""
    shared = page.split("## Shared settings")[1]
    assert "### Training" in shared and page.count("| `--data_dir` |") == 1 and "| `--data_dir` |" in shared
    assert page.count("[Training](#training)") == 2
    fast = page.split("### `fast.py a`")[1].split("### `fast.py b`")[0]
    assert "**Fast training**" in fast and "| `--lr` | `1.0` | rate \\| speed |" in fast and "--flip" not in fast
    assert "**Network**" in page and "### Network" not in page and "### Sampling" not in page
    assert page.count("| `--timesteps` |") == 1 and page.count("| `--set decoder.unets.N.dim` |") == 1


def test_expectations_are_listed_by_name(page):
    assert "**Checks** (if given, each must equal the checkpoint's setting): `--sampler`, `--eta`." in page


def test_settings_in_place_of_a_checkpoints_are_listed_by_name(page):
    assert "**Given** (if given, each replaces the checkpoint's setting): `--radius`." in page
