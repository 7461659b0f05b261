"""Describe a checkpoint file or the network of a training command: parameters, FLOPs and training memory. Nothing is
allocated; ``--kind generator`` or ``--kind classifier`` selects the training command.
``info.py plan`` plans a run on given GPUs."""

import sys

import help_without_torch  # noqa: F401

from diff_dalle.commands.info import PLAN, describe, parse_info, parse_plan, plan
from diff_dalle.distributed.launch import run_script


def main():
    if sys.argv[1:2] == ["plan"]:
        print(plan(parse_plan(sys.argv[2:], PLAN)))
    else:
        print(describe(parse_info(description=__doc__)))


if __name__ == "__main__":
    run_script(main)
