"""Train a network of the latent cascade (stage A, semantic encoder, stage B or C), configured by CONFIG.yaml."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.distributed.launch import run_script
from diff_dalle.recipes.train import launch_training


def main():
    launch_training(parse_cascade(description=__doc__))


if __name__ == "__main__":
    run_script(main)
