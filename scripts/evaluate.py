"""Score a generator, and what guidance adds: sample captions, judge the pictures, write a report."""

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.distributed.launch import launch, run_script


def main():
    run = parse(EvaluateRun, description=__doc__)
    with launch(run.distributed) as world:
        evaluation = Evaluation(run, world)
        table = evaluation.judge()
        if world.is_main:
            print(table, f"\nReport and pictures: {evaluation.write()}", sep="\n")


if __name__ == "__main__":
    run_script(main)
