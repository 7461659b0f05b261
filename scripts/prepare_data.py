"""Make and inspect shards: ``shapes`` and ``emoji`` render small worlds, ``folder`` packs images, ``inspect`` describes
shards, ``embeddings`` computes the embeddings of their samples, ``latents`` what stages B and C train on."""

import sys

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import run_subcommand
from diff_dalle.commands.prepare import commands_of
from diff_dalle.distributed.launch import run_script


def main():
    for line in run_subcommand(commands_of(sys.argv[1:]), __doc__):
        print(line)


if __name__ == "__main__":
    run_script(main)
