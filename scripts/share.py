"""Share models: ``push`` sends one with its card to the Hugging Face hub or a folder, ``pull`` fetches one."""

import argparse
import sys

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.share import COMMANDS
from diff_dalle.distributed.launch import run_script


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="COMMAND --help lists the flags of a command")
    parser.add_argument("command", choices=COMMANDS)
    command = COMMANDS[parser.parse_args(sys.argv[1:2]).command]
    for line in command.run(parse(command.config, sys.argv[2:], command.description)):
        print(line)


if __name__ == "__main__":
    run_script(main)
