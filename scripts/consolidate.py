"""Convert a sharded checkpoint to ordinary files, tensor by tensor: model….pt, ema_….pt and opt….pt."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.file_settings import ConsolidateConfig
from diff_dalle.distributed.launch import run_script


def main():
    config = parse(ConsolidateConfig, description=__doc__)
    from diff_dalle.commands.gathering import consolidate_checkpoint  # loads torch

    print(consolidate_checkpoint(config))


if __name__ == "__main__":
    run_script(main)
