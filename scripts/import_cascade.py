"""Write a checkpoint of a latent cascade's network from released weights: the files of the public networks,
torchvision's weights of the semantic encoder's backbone, or a stage B trained with its semantic encoder."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.file_settings import ImportConfig
from diff_dalle.distributed.launch import run_script


def main():
    config = parse(ImportConfig, description=__doc__)
    from diff_dalle.commands.import_cascade import import_cascade  # loads torch

    print(import_cascade(config))


if __name__ == "__main__":
    run_script(main)
