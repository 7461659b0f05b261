"""Train a network of the latent cascade (stage A, semantic encoder, stage B or C), as a file says: CONFIG.yaml."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.cascade.reading import parse_cascade
from diff_dalle.commands.training import train
from diff_dalle.distributed.launch import launch, run_script


def main():
    run = parse_cascade(description=__doc__)
    with launch(run.distributed) as world:
        train(run, world)


if __name__ == "__main__":
    run_script(main)
