"""The commands of prepare_data.py: what they print and write."""

import numpy as np
from checkpoint_making import make_classifier_file
from PIL import Image
from script_running import run as run_script
from shard_making import make_shards, sample, tar_bytes

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
    assert skipped == [
        "3 files in the folder: 1 picture, 1 caption packed, 1 skipped",
        "skipped 1 file: no caption (without_caption.png)",
    ]
    inspected = run("inspect", data_dir=tmp_path / "shards", grid="")
    assert inspected[2:5] == [f"packed into {tmp_path / 'shards'}:", *(f"  {line}" for line in skipped)]
    assert last == f"report: {tmp_path / 'shards' / 'report.json'}" and (tmp_path / "shards" / "report.json").exists()


def test_embeddings_are_the_same_files_on_any_number_of_processes(tmp_path):
    clip = make_classifier_file(tmp_path, noised=False)
    (tmp_path / "shards").mkdir()
    make_shards(tmp_path / "shards", [2, 2, 2, 2, 1])
    for shard in (1, 3):  # of different processes
        files = [
            file for key in ("0001", "0002") for file in sample(key, "caption", b"broken" if key == "0002" else None)
        ]
        (tmp_path / "shards" / f"0000{shard}.tar").write_bytes(tar_bytes(files))
    flags = ["--data_dir", tmp_path / "shards", "--clip_path", clip, "--what", "image,text_states"]
    flags = ["embeddings", *flags, "--dtype", "float32", "--device", "cpu", "--batch_size", "2"]
    one = run_script("prepare_data.py", *flags, "--out_dir", tmp_path / "one", "--threads", "2")
    three = run_script("prepare_data.py", *flags, "--out_dir", tmp_path / "three", ranks=3)
    lines = [
        f"Disk: about 0.0 MB in {tmp_path}/one (image 0.0).",
        f"Disk: about 0.0 MB in {tmp_path}/one (text_states 0.0).",
        f"{tmp_path}/one/img_emb: 7 embeddings [16]",
        "2 samples without",
        "  ",
        "  ",
        f"{tmp_path}/one/text_states: 9",
    ]
    assert all(line.startswith(start) for line, start in zip(one.stdout.splitlines(), lines, strict=True))
    assert three.stdout == one.stdout.replace("/one", "/three")
    files = {
        folder: {path.relative_to(tmp_path / folder): path.read_bytes() for path in (tmp_path / folder).rglob("*.*")}
        for folder in ("one", "three")
    }
    assert len(files["one"]) == 2 * (5 + 1) and files["one"] == files["three"]
    bad = run_script("prepare_data.py", *flags, "--out_dir", tmp_path / "one", "--index_width", "3", ok=False)
    assert bad.returncode == 2 and "index_width is 0 there and 3 here" in bad.stderr
