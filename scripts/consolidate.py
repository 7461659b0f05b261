"""Convert a sharded checkpoint to ordinary files, tensor by tensor: model….pt, ema_….pt and opt….pt."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.gathering import ConsolidateConfig, consolidate_checkpoint
from diff_dalle.distributed.launch import run_script


def main():
    print(consolidate_checkpoint(parse(ConsolidateConfig, description=__doc__)))


if __name__ == "__main__":
    run_script(main)
