"""Merge LoRAs into the weights of the network they were trained for, or remove them, and write a plain checkpoint."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.file_settings import MergeConfig
from diff_dalle.distributed.launch import run_script


def main():
    config = parse(MergeConfig, description=__doc__)
    from diff_dalle.commands.merge_lora import merge_lora_files  # loads torch

    print(merge_lora_files(config))


if __name__ == "__main__":
    run_script(main)
