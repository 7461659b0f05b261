"""Recompute a training step with a non-finite gradient, as the run's flight.jsonl recorded it: its samples, losses and
norms, and where the first non-finite value appears."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.file_settings import ReplayRun
from diff_dalle.distributed.launch import launch, run_script


def main():
    run = parse(ReplayRun, description=__doc__)
    from diff_dalle.commands.replay import replay_step  # loads torch

    with launch(run.distributed) as world:
        print(replay_step(run.what, world))


if __name__ == "__main__":
    run_script(main)
