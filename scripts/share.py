"""Share models: ``push`` sends one with its card to the Hugging Face hub or a folder, ``pull`` fetches one."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.share import COMMANDS
from diff_dalle.commands.subcommands import run_subcommand
from diff_dalle.distributed.launch import run_script


def main():
    for line in run_subcommand(COMMANDS, __doc__):
        print(line)


if __name__ == "__main__":
    run_script(main)
