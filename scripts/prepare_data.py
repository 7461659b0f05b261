"""Make and inspect shards: ``shapes`` and ``emoji`` render small worlds, ``folder`` packs images, ``inspect`` describes
shards, ``embeddings`` computes the embeddings of their samples."""

import argparse
import sys

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.prepare import COMMANDS
from diff_dalle.distributed.launch import run_script


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="COMMAND --help lists the flags of a command")
    parser.add_argument("command", choices=COMMANDS)
    command = COMMANDS[parser.parse_args(sys.argv[1:2]).command]
    for line in command.run(parse(command.config, sys.argv[2:], command.description)):
        print(line)


if __name__ == "__main__":
    run_script(main)
