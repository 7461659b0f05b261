"""Make a checkpoint of ours of one of Improved Diffusion, Guided-Diffusion, GLIDE, Diff-DALLE or DALLE2-pytorch, or the
reverse; or write a network of a latent cascade as one of Stable Cascade."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.distributed.launch import run_script


def main():
    print(convert(parse(ConvertConfig, description=__doc__)))


if __name__ == "__main__":
    run_script(main)
