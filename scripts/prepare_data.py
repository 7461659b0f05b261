"""Make and inspect shards: ``shapes`` and ``emoji`` render small worlds, ``folder`` packs images, ``inspect`` describes
shards, ``embeddings`` computes the embeddings of their samples."""

import argparse
import sys

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.examples import usage
from diff_dalle.commands.prepare import COMMANDS
from diff_dalle.distributed.launch import run_script


def main():
    epilog = "COMMAND --help lists the flags of a command"
    parser = argparse.ArgumentParser(usage=usage(sys.argv[0], "COMMAND"), description=__doc__, epilog=epilog)
    parser.add_argument("command", choices=COMMANDS)
    name = parser.parse_args(sys.argv[1:2]).command
    command = COMMANDS[name]
    for line in command.run(parse(command.config, sys.argv[2:], command.description, name)):
        print(line)


if __name__ == "__main__":
    run_script(main)
