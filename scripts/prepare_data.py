"""Make shards and look into them: ``shapes`` renders the demo world, ``folder`` packs images, ``inspect`` reports."""

import argparse
import sys
from dataclasses import dataclass

from diff_dalle import storage
from diff_dalle.commands.command_line import parse
from diff_dalle.config import option, section
from diff_dalle.data.inspection import InspectionConfig, inspect_shards
from diff_dalle.data.packing import PackingConfig, pack_folder
from diff_dalle.distributed.launch import run_script
from diff_dalle.errors import quantity
from diff_dalle.images.output import png_bytes
from diff_dalle.shapes.scenes import ShapesConfig
from diff_dalle.shapes.shards import write_shapes


@dataclass(frozen=True)
class ShapesRun:
    """Rendering the shapes world"""

    out_dir: str = option("data/shapes", "folder for the shards of the splits train and val, local or remote")
    shapes: ShapesConfig = section(ShapesConfig)


def shapes(argv: list[str]):
    run = parse(ShapesRun, argv, "Render the shapes world into shards.")
    for split, made in write_shapes(run.shapes, run.out_dir).items():
        where = storage.join(run.out_dir, split)
        print(f"{where}: {quantity(made['samples'], 'sample')} in {quantity(made['shards'], 'shard')}")


def folder(argv: list[str]):
    config = parse(PackingConfig, argv, "Pack a folder of captioned images into shards.")
    report = pack_folder(config)
    written, shards = quantity(report["written"], "image"), quantity(report["shards"], "shard")
    print(f"{config.out_dir}: {written} in {shards}, {report['bytes'] / 1e6:,.1f} MB")
    for reason, count in report["skipped"].items():
        print(f"left out {quantity(count, 'image')}: {reason}")
    print(f"what was left out, file by file: {storage.join(config.out_dir, 'report.json')}")


def inspect(argv: list[str]):
    config = parse(InspectionConfig, argv, "Say what is in shards.")
    lines, picture = inspect_shards(config)
    print("\n".join(lines))
    if picture and config.picture:
        storage.write_bytes(config.picture, png_bytes(picture))
        print(f"examples: {config.picture}")


COMMANDS = {"shapes": shapes, "folder": folder, "inspect": inspect}


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="COMMAND --help lists the flags of a command")
    parser.add_argument("command", choices=COMMANDS)
    COMMANDS[parser.parse_args(sys.argv[1:2]).command](sys.argv[2:])


if __name__ == "__main__":
    run_script(main)
