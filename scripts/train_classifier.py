"""Train a noised CLIP, which tells how well a noisy image fits a caption, on shards of captioned images."""

from diff_dalle.command_line import parse
from diff_dalle.distributed import launch, run_script
from diff_dalle.tasks.classifier_run import ClassifierRun
from diff_dalle.tasks.training_run import train


def main():
    run = parse(ClassifierRun, description=__doc__)
    with launch(run.distributed) as world:
        train(run, world)


if __name__ == "__main__":
    run_script(main)
