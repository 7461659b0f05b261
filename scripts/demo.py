"""Sample from the bundled models; then train, sample and score at small scale, on a rendered world."""

import time
from pathlib import Path

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.demo.chapters import CHAPTERS, DemoConfig, show_first_pictures
from diff_dalle.commands.demo.contract import Demo
from diff_dalle.distributed.launch import run_script


def main():
    config, started = parse(DemoConfig, description=__doc__), time.monotonic()
    demo = Demo(Path(config.demo_dir).resolve(), config.quick)
    show_first_pictures(demo)
    reports = [CHAPTERS[name].run(demo) for name in config.what]
    minutes = (time.monotonic() - started) / 60
    print(f"\nDone in {minutes:.1f} minutes. The report is {', '.join(map(str, reports))}")


if __name__ == "__main__":
    run_script(main)
