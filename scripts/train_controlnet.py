"""Train a ControlNet, which steers a trained generator by edges, masks or other pictures, on captioned images."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.training_kinds import parse_controlnet
from diff_dalle.distributed.launch import run_script
from diff_dalle.recipes.train import launch_training


def main():
    launch_training(parse_controlnet(description=__doc__))


if __name__ == "__main__":
    run_script(main)
