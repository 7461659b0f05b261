"""Convert a checkpoint of Improved Diffusion, Guided-Diffusion, GLIDE, Diff-DALLE or DALLE2-pytorch to ours, or the
reverse; or a network of a latent cascade to Stable Cascade's."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.file_settings import ConvertConfig
from diff_dalle.distributed.launch import run_script


def main():
    config = parse(ConvertConfig, description=__doc__)
    from diff_dalle.commands.convert import convert  # loads torch

    print(convert(config))


if __name__ == "__main__":
    run_script(main)
