import csv
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusing import refused
from shard_making import Letters, captions_of, encoded, load, random_image

from diff_dalle.data.inspection import InspectionConfig, inspect_shards
from diff_dalle.data.packing import CROPPED, PackingConfig, pack_folder, words_of
from diff_dalle.data.spec import CaptionSpec, ImageSpec, SampleSpec


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pack(**changes) -> dict:
    return pack_folder(PackingConfig(**{"source": "in", "out_dir": "out", **changes}))


def packed() -> list[str]:
    """Sorted captions, as training reads them."""
    data = load("out", SampleSpec(ImageSpec((16, 16)), (CaptionSpec(Letters(), 60),)))
    return sorted(captions_of(data.batch_at(range(data.samples))))


@pytest.fixture
def folder() -> Path:
    folder = Path("in")
    (folder / "sub.d").mkdir(parents=True)
    for i, name in enumerate(("b.JPG", "a.png", "sub.d/c.v2.webp")):
        form = {"jpg": "JPEG"}.get(name.rpartition(".")[2].lower(), name.rpartition(".")[2].upper())
        (folder / name).write_bytes(encoded(random_image(30 + 10 * i, 40, seed=i), form))
        (folder / name).with_suffix(".txt").write_text(f"Ünïcode {i}\n", encoding="utf-8")
    return folder


def test_a_folder_comes_back_out_of_its_shards_and_repeats_itself(folder):
    report = pack(samples_per_shard=2)
    counts = {"files": 6, "packed": {"picture": 3, "caption": 3}, "written": 3, "shards": 2, "skipped": {}}
    assert {name: report[name] for name in counts} == counts
    tars = [path.read_bytes() for path in sorted(Path("out").glob("*.tar"))]
    assert report["bytes"] == sum(map(len, tars)) and json.loads(Path("out/report.json").read_text()) == report
    assert packed() == [f"Ünïcode {i}" for i in range(3)]
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    pack(out_dir="again", samples_per_shard=2)
    assert [path.read_bytes() for path in sorted(Path("again").glob("*.tar"))] == tars
    with refused("is not empty; choose another, nothing is overwritten"):
        pack()


def test_images_are_downsampled_but_never_upsampled(folder):
    pack(resize=35)
    with tarfile.open("out/00000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    images = {name: Image.open(io.BytesIO(data)) for name, data in members.items() if name[-4:] in (".jpg", ".png")}
    sizes = {"00000000.png": ("PNG", 35), "00000001.jpg": ("JPEG", 30), "00000002.jpg": ("JPEG", 35)}
    assert {name: (image.format, min(image.size)) for name, image in images.items()} == sizes
    record = json.loads(members["00000002.json"])
    assert (record["file_name"], record["width"], record["height"]) == ("sub.d/c.v2.webp", 35, 44)


def test_captions_may_come_from_one_file(folder):
    rows = [
        {"file_name": "b.JPG", "text": "from the list", "artist": "x"},
        {"file_name": "./sub.d/c.v2.webp", "text": "also, with a comma"},
        {"file_name": "gone.jpg", "text": "no such file"},
        {"file_name": "../secret.jpg", "text": "outside"},
    ]
    Path("secret.jpg").write_bytes(encoded(random_image()))
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = pack(caption_column="text")
    assert report["skipped_rows"] == {"named in the metadata, but missing": 1, "outside the folder": 1}
    assert report["skipped"] == {"a text whose picture has another caption": 2}
    assert packed() == ["also, with a comma", "from the list", "Ünïcode 1"]
    (folder / "metadata.jsonl").unlink()
    with open(folder / "metadata.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["file_name", "text", "artist"])
        writer.writeheader()
        writer.writerows(rows)
    pack(caption_column="text", out_dir="csv")
    with refused(r"metadata\.csv .* no field 'caption', only .*caption_column"):
        pack(out_dir="x")
    (folder / "metadata.jsonl").write_text("{")
    with refused(r"metadata\.jsonl, line 1 is not a JSON object"):
        pack(out_dir="x")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such file names")
def test_text_that_utf8_cannot_hold_is_reported_and_the_rest_packed(folder):
    image = encoded(random_image())
    with open(os.fsencode(folder) + b"/caf\xe9.jpg", "wb") as file:
        file.write(image)
    rows = [
        {"file_name": "nul\0.jpg", "caption": "x"},
        {"file_name": "half\ud800.jpg", "caption": "x"},
        {"file_name": "b.JPG", "caption": "half \ud83d of a cat"},
        {"file_name": "a.png", "caption": "fine", "note\udc00": 1},
        {"file_name": "d.jpg", "caption": "nul \0 inside"},
    ]
    (folder / "d.jpg").write_bytes(image)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = pack()
    assert {entry["file_name"]: entry["reason"] for entry in report["skipped_files"]} == {
        "caf\\udce9.jpg": "its file name is not valid UTF-8 text",
        "b.JPG": "its caption is not UTF-8",
        "a.png": "its metadata is not UTF-8",
        "d.jpg": "its caption holds a NUL character",
        **dict.fromkeys(("a.txt", "b.txt"), "the caption of a picture that is not packed"),
        "metadata.jsonl": "metadata without a row of a packed picture",
    }
    assert [row["reason"] for row in report["rows"]] == [
        f"named in the metadata, but missing: {name}" for name in ("nul\0.jpg", "half\\ud800.jpg")
    ]
    assert json.loads(Path("out/report.json").read_text("utf-8")) == report
    assert packed() == ["Ünïcode 2"]


def test_a_line_of_metadata_ends_with_a_line_feed_only(folder):
    caption = "one\u2028two\x85three"
    lines = [json.dumps({"file_name": "b.JPG", "caption": caption}, ensure_ascii=False), "{broken", "[]"]
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    report = pack()
    assert caption in packed() and report["written"] == 3
    assert report["rows"] == [{"row": f"metadata.jsonl, line {i}", "reason": "is not a JSON object"} for i in (2, 3)]


def test_an_open_quote_costs_one_row(folder):
    (folder / "metadata.csv").write_text(
        'file_name,caption,x\nb.JPG,"open\na.png,"closed ""here""\nand there",1,2,3\nsub.d/c.v2.webp,"never closed\n'
    )
    report = pack()
    assert packed() == ['closed "here"\nand there', "Ünïcode 0", "Ünïcode 2"]
    assert [row["row"] for row in report["rows"]] == ["metadata.csv, line 2", "metadata.csv, line 5"]
    assert all("is a quote left open?" in row["reason"] for row in report["rows"])
    with tarfile.open("out/00000.tar") as tar:
        record = json.load(tar.extractfile("00000000.json"))
    assert (record["file_name"], record["x"], record["more"]) == ("a.png", "1", ["2", "3"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, r"source \(not set\) is not a folder"),
        ({"source": "/nowhere"}, "source /nowhere is not a folder"),
        ({"out_dir": ""}, "out_dir is not set"),
        ({"samples_per_shard": 0}, "samples_per_shard is 0, but must be at least 1"),
    ],
)
def test_bad_settings_are_refused(folder, changes, message):
    with refused(message):
        pack(**changes)


def test_a_folder_without_images_or_captions_is_refused():
    Path("in").mkdir()
    with refused("holds no images"):
        pack()
    Path("in/a.jpg").write_bytes(encoded(random_image()))
    with refused("none of the 1 images in source .* can be packed: .*skipped 1 file: no caption"):
        pack()
    assert pack(captions=False, out_dir="all")["written"] == 1


def test_inspection_reports_contents_and_broken_samples(folder):
    (folder / "d.jpg").write_bytes(encoded(random_image(300, 300)))
    (folder / "d.txt").write_text("one two three four")
    pack()
    out = Path("out/00000.tar")
    image = (folder / "b.JPG").read_bytes()
    out.write_bytes(out.read_bytes().replace(image, b"x" * len(image)))
    lines, grid = inspect_shards(InspectionConfig(("out",)))
    text = "\n".join(lines)
    for part in ("1 shard, 4 samples", ".txt 4", "decoded 4 samples: 1 broken", "00000.tar : 00000001: not a"):
        assert part in text
    for part in ("longest 18", "shortest 2, median 2", "256-511"):
        assert part in text
    assert grid.width > 3 * 96 and len(np.unique(np.asarray(grid))) > 100
    lines, grid = inspect_shards(InspectionConfig(("out",), caption_field="json:nothing"))
    assert grid is None and "4 broken" in "\n".join(lines)
    lines, grid = inspect_shards(InspectionConfig(("out",), caption_field="cap"))
    assert "no captions: no .cap members (caption_field)" in lines and grid is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a_red-barn (2).png", "a red barn"),
        ("Grandma's cat.jpg", "Grandma's cat"),
        ("Überfahrt.webp", "Überfahrt"),
        ("at the lake/IMG_2041.JPG", "at the lake"),
        ("lake/day 2/DSC00012.jpg", "day"),
        ("x/2041.png", ""),
    ],
)
def test_words_of_names(name, words):
    assert words_of(name) == words


def test_pictures_without_captions_may_be_captioned_by_their_names(folder):
    """Also those whose caption is empty."""
    (folder / "a.txt").unlink()
    (folder / "b.txt").write_text(" ")
    (folder / "a.png").rename(folder / "sub.d/the house.png")
    strict = pack(out_dir="strict")["skipped"]
    assert strict == {"no caption": 1, "its caption is empty": 1, "the caption of a picture that is not packed": 1}
    assert pack(name_captions=True)["notes"] == {"captioned by the words of their names": 2, CROPPED: 1}
    assert packed() == ["in", "the house", "Ünïcode 2"]


@pytest.mark.parametrize(("height", "width", "said"), [(20, 25, False), (20, 26, True), (26, 20, True)])
def test_pictures_that_training_crops_are_counted(height, width, said):
    """Also those turned by their EXIF data, as they are seen."""
    os.mkdir("in")
    exif = Image.Exif()
    exif[0x112] = 6
    image = random_image(height, width)
    image.save("in/a.jpg")
    image.save("in/b.jpg", exif=exif)
    Path("in/c.png").write_bytes(encoded(random_image(24, 20), "PNG"))
    notes = pack(name_captions=True)["notes"]
    expected = "longer than 5:4: training crops them to squares, unless multi_aspect_ratio is set"
    assert notes.get(expected, 0) == 2 * said, notes
