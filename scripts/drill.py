"""Drill the promises about faults: real runs are killed, cut off, poisoned or starved and must end as promised."""

import sys

import help_without_torch  # noqa: F401
import with_tests  # noqa: F401
from drills.table import DrillConfig, run_drill, table, write_table

from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.launch import run_script


def main():
    config = parse(DrillConfig, description=__doc__)
    rows = run_drill(config)
    print(table(rows))
    if config.out_dir:
        write_table(rows, config.out_dir)
    if any(row.result == "FAIL" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
