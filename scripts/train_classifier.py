"""Train a noised CLIP, which tells how well a noisy image fits a caption, on shards of captioned images."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.launch import run_script
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.train import launch_training


def main():
    launch_training(parse(ClassifierRun, description=__doc__))


if __name__ == "__main__":
    run_script(main)
