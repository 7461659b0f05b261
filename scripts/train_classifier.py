"""Train a noised CLIP, which tells how well a noisy image fits a caption, on shards of captioned images."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.train import train


def main():
    run = parse(ClassifierRun, description=__doc__)
    with launch(run.distributed) as world:
        train(run.recipe(world.size), world)


if __name__ == "__main__":
    run_script(main)
