"""Train a LoRA, and new tokens, for a trained generator, classifier or decoder, which itself stays as it is."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.training_kinds import parse_lora
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.recipes.train import train


def main():
    run = parse_lora(description=__doc__)
    with launch(run.recipe().distributed) as world:
        train(run.recipe(world.size), world)


if __name__ == "__main__":
    run_script(main)
