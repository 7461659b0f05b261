"""Train a decoder (image embeddings to images, a cascade of U-Nets), configured by --config_file FILE."""

import help_without_torch  # noqa: F401

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.decoder_report import describe_decoder
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.recipes.decoder import DecoderRun
from diff_dalle.recipes.recipe import spelled_as_in_file
from diff_dalle.recipes.train import train_recipe


def main():
    run = parse(DecoderRun, description=__doc__)
    with launch(run.recipe().distributed) as world, spelled_as_in_file(DecoderRun):
        if run.check:
            world.print(describe_decoder(run, world))
        else:
            train_recipe(run.recipe(world.size), world)


if __name__ == "__main__":
    run_script(main)
