"""Train on a folder of pictures: pack them, train a generator or a LoRA of one, and sample from it. Further flags are
those of train_generator.py, or with --model_path of train_lora.py."""

import sys

import help_without_torch  # noqa: F401

from diff_dalle.commands.own_pictures import read_command_line, train_on
from diff_dalle.distributed.launch import run_script


def main():
    train_on(*read_command_line(sys.argv[1:], __doc__))


if __name__ == "__main__":
    run_script(main)
