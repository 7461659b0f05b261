"""Train a LoRA, and new tokens, for a trained generator, classifier or decoder, which itself stays frozen."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.training_kinds import parse_lora
from diff_dalle.distributed.launch import run_script
from diff_dalle.recipes.train import launch_training


def main():
    launch_training(parse_lora(description=__doc__))


if __name__ == "__main__":
    run_script(main)
