"""Print the time and memory of our implementations relative to baselines, and the errors of solvers."""

import os
from dataclasses import dataclass

import help_without_torch  # noqa: F401
import with_tests  # noqa: F401
from benchmarks.registry import BENCHMARKS, LONG
from benchmarks.timing import TimingConfig, results

from diff_dalle.commands.command_line import parse
from diff_dalle.config import lookup, option, section
from diff_dalle.distributed.launch import run_script


@dataclass(frozen=True)
class BenchmarkRun:
    benchmarks: tuple[str, ...] = option(
        tuple(name for name in BENCHMARKS if name not in LONG), f"benchmarks to run, of {', '.join(BENCHMARKS)}"
    )
    timing: TimingConfig = section(TimingConfig)


def main():
    run = parse(BenchmarkRun, description=__doc__)
    # On a busy machine, spinning threads take cores from the threads they wait for. Read when a process starts.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    chosen = {name: lookup(BENCHMARKS, name, "benchmark") for name in run.benchmarks}
    for name, benchmark in chosen.items():
        print(f"{name}: {benchmark.title}", flush=True)
        for text in results(benchmark, run.timing):
            print(text, flush=True)
        print(flush=True)


if __name__ == "__main__":
    run_script(main)
