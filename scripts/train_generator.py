"""Train a text-to-image generator (text encoder and U-Net) on shards of captioned images."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.launch import run_script
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.train import launch_training


def main():
    launch_training(parse(GeneratorRun, description=__doc__))


if __name__ == "__main__":
    run_script(main)
