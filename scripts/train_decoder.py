"""Train a decoder (image embeddings to images, a cascade of U-Nets), as a file says: --config_file FILE."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.decoder.report import describe_decoder
from diff_dalle.commands.spelling import spelled_as_in_file
from diff_dalle.commands.train_decoder import DecoderRun
from diff_dalle.commands.training import train
from diff_dalle.distributed.launch import launch, run_script


def main():
    run = parse(DecoderRun, description=__doc__)
    with launch(run.launching) as world, spelled_as_in_file(DecoderRun):
        if run.check:
            world.print(describe_decoder(run, world))
        else:
            train(run, world)


if __name__ == "__main__":
    run_script(main)
