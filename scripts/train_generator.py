"""Train a text-to-image generator (text encoder and U-Net) on shards of captioned images."""

from diff_dalle.command_line import parse
from diff_dalle.distributed import launch, run_script
from diff_dalle.tasks.generator_run import GeneratorRun
from diff_dalle.tasks.training_run import train


def main():
    run = parse(GeneratorRun, description=__doc__)
    with launch(run.distributed) as world:
        train(run, world)


if __name__ == "__main__":
    run_script(main)
