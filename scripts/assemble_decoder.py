"""Assemble separately trained U-Nets into one decoder file to sample from."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.gathering import AssembleConfig, assemble_decoder
from diff_dalle.distributed.launch import run_script


def main():
    print(assemble_decoder(parse(AssembleConfig, description=__doc__)))


if __name__ == "__main__":
    run_script(main)
