"""Assemble separately trained U-Nets into one decoder file to sample from."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.file_settings import AssembleConfig
from diff_dalle.distributed.launch import run_script


def main():
    config = parse(AssembleConfig, description=__doc__)
    from diff_dalle.commands.gathering import assemble_decoder  # loads torch

    print(assemble_decoder(config))


if __name__ == "__main__":
    run_script(main)
