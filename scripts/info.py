"""Say what is in a checkpoint file, or what a preset's generator costs, without allocating it."""

from dataclasses import dataclass

from diff_dalle import pipeline, storage
from diff_dalle.command_line import parse, preset_settings
from diff_dalle.config import option
from diff_dalle.distributed import run_script


@dataclass(frozen=True)
class InfoConfig:
    """Info"""

    model_path: str = option("", "checkpoint file of a generator; empty = describe the settings given by the other flags")
