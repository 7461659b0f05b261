"""The commands of prepare_data.py: what they print and write."""

import numpy as np
from PIL import Image

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.prepare import COMMANDS


def run(name, **flags):
    command = COMMANDS[name]
    return command.run(parse(command.config, [str(part) for k, v in flags.items() for part in (f"--{k}", v)]))


def test_shapes_are_rendered_and_inspected(tmp_path):
    world = tmp_path / "world"
    lines = run("shapes", out_dir=world, image_size=16, train_samples=5, val_samples=1, samples_per_shard=3)
    assert lines == [f"{world}/train: 5 samples in 2 shards", f"{world}/val: 1 sample in 1 shard"]
    lines = run("inspect", data_dir=world / "train", grid=tmp_path / "examples.png")
    assert lines[-1] == f"examples: {tmp_path / 'examples.png'}"
    assert np.asarray(Image.open(tmp_path / "examples.png")).std() > 10
    assert not any("examples:" in line for line in run("inspect", data_dir=world / "train", grid=""))


def test_a_folder_is_packed_and_what_was_skipped_is_named(tmp_path):
    source = tmp_path / "images"
    source.mkdir()
    Image.new("RGB", (70, 70), "red").save(source / "a.png")
    (source / "a.txt").write_text("a red image")
    Image.new("RGB", (70, 70), "blue").save(source / "without_caption.png")
    first, *skipped, last = run("folder", source=source, out_dir=tmp_path / "shards")
    assert first.startswith(f"{tmp_path / 'shards'}: 1 image in 1 shard, ")
    assert len(skipped) == 1 and skipped[0].startswith("skipped 1 image: ")
    assert last == f"report: {tmp_path / 'shards' / 'report.json'}" and (tmp_path / "shards" / "report.json").exists()
