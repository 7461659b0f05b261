"""Evaluate a generator: sample captions, score the samples, write a report."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.distributed.launch import launch, run_script


def main():
    run = parse(EvaluateRun, description=__doc__)
    with launch(run.distributed) as world:
        evaluation = Evaluation(run, world)
        tables = evaluation.run()
        if world.is_main:
            print(tables, f"\nReport: {evaluation.write()}", sep="\n")


if __name__ == "__main__":
    run_script(main)
