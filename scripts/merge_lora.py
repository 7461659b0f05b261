"""Merge LoRAs into the weights of the network they were trained for, or remove them, and write a plain checkpoint."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.merge_lora import MergeConfig, merge_lora_files
from diff_dalle.distributed.launch import run_script


def main():
    print(merge_lora_files(parse(MergeConfig, description=__doc__)))


if __name__ == "__main__":
    run_script(main)
