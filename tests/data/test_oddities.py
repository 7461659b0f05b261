"""A folder as people have it: every file is packed, or skipped for one reason that is said everywhere."""

import io
import json
import os
import re
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from icc_making import rgb_profile
from PIL import Image
from refusing import refused
from shard_making import Letters, captions_of, encoded, load, make_tar, random_image

from diff_dalle.commands.prepare import folder as folder_command
from diff_dalle.data import packing
from diff_dalle.data.accounting import Reason, report_lines
from diff_dalle.data.inspection import InspectionConfig, inspect_shards
from diff_dalle.data.packing import PackingConfig, pack_folder
from diff_dalle.data.shard_table import IMAGE
from diff_dalle.data.spec import CaptionSpec, ImageSpec, SampleSpec

WIDE = rgb_profile()
SQUARE = (np.arange(400).reshape(20, 20) * 163).astype(np.uint16)
JPEG, PNG = encoded(random_image()), encoded(random_image(), "PNG")


def frames(form: str, **options) -> bytes:
    return encoded(random_image(), form, save_all=True, append_images=[random_image(seed=1)], **options)


#: Pictures that are packed, with the kind of their member.
PICTURES = {
    "plain.png": (PNG, "png"),
    "UPPER.JPG": (JPEG, "jpg"),
    "v1.0.png": (PNG, "png"),
    unicodedata.normalize("NFD", "é.png"): (PNG, "png"),
    "truth.heic": (JPEG, "jpg"),
    "gif.jpg": (encoded(random_image(), "GIF"), "png"),
    "animated.gif": (frames("GIF"), "png"),
    "animated.webp": (frames("WEBP", lossless=True), "png"),
    "animated.png": (frames("PNG"), "png"),
    "several.jpg": (frames("MPO"), "jpg"),
    "pages.tiff": (frames("TIFF"), "png"),
    "windows.bmp": (encoded(random_image(), "BMP"), "png"),
    "net.pgm": (encoded(random_image().convert("L"), "PPM"), "png"),
    "old.tga": (encoded(random_image(), "TGA"), "png"),
    "icon.ico": (encoded(random_image(32, 32), "ICO", sizes=[(32, 32)]), "png"),
    "film.jp2": (encoded(random_image(), "JPEG2000"), "png"),
    "deep.png": (encoded(Image.fromarray(SQUARE), "PNG"), "png"),
    "inks.jpg": (encoded(random_image().convert("CMYK")), "jpg"),
    "phone.jpg": (encoded(random_image(), icc_profile=WIDE), "jpg"),
    "phone.bmp.webp": (encoded(random_image(), "WEBP", icc_profile=WIDE), "webp"),
    "profile.jpg": (encoded(random_image(), icc_profile=b"none" * 40), "jpg"),
    "clear.png": (encoded(random_image().convert("RGBA").rotate(9), "PNG"), "png"),
}
#: Captions by file, of pictures of that name; a picture is made for those that end in .txt.
CAPTIONS = {
    "utf16.txt": "a café".encode("utf-16"),
    "bom.txt": "a café".encode("utf-8-sig"),
    "upper.TXT": b"upper",
    "kohya.caption": b"kohya",
    "double.png.txt": b"double",
}
SKIPPED = {
    "html.jpg": (b"<html>403</html>", Reason.NO_PICTURE),
    "phone.jxl": (b"\xff\x0a" + bytes(100), Reason.NO_PICTURE),
    "camera.dng": (encoded(random_image(), "TIFF"), Reason.NO_PICTURE),
    "cut.jpg": (JPEG[: len(JPEG) // 2], Reason.UNREADABLE),
    "empty.jpg": (b"", Reason.EMPTY),
    "range.tif": (encoded(Image.fromarray(SQUARE.astype(np.float32)), "TIFF"), Reason.UNREADABLE),
    "huge.png": (encoded(Image.new("1", (300, 300)), "PNG"), Reason.TOO_LARGE),
    "silent.png": (PNG, Reason.NO_CAPTION),
    "cp1252.png": (PNG, Reason.CAPTION_NOT_UTF8),
    "blank.png": (PNG, Reason.CAPTION_EMPTY),
    "zeros.png": (PNG, Reason.CAPTION_NUL),
    "cp1252.txt": ("a man’s café".encode("cp1252"), Reason.CAPTION_LOST),
    "blank.txt": (b" \n", Reason.CAPTION_LOST),
    "zeros.txt": ("a cat".encode("utf-16-le"), Reason.CAPTION_LOST),
    "plain.caption": (b"another", Reason.CAPTION_UNUSED),
    "readme.txt": (b"about", Reason.CAPTION_ALONE),
    "metadata.json": (b"{}", Reason.METADATA_NEARLY),
    "train/meta_data.jsonl": (b"{}", Reason.METADATA_NEARLY),
    "train/metadata.csv": (b"file_name", Reason.METADATA_SECOND),
    "Thumbs.db": (b"x", Reason.HIDDEN),
    ".DS_Store": (b"x", Reason.HIDDEN),
    "._plain.png": (b"\0\5\x16\7", Reason.HIDDEN),
    ".git/config": (b"x", Reason.HIDDEN),
    "__MACOSX/plain.png": (PNG, Reason.HIDDEN),
    "latents.npz": (b"x", Reason.OTHER),
    "no_extension": (PNG, Reason.OTHER),
}
ROWS = [
    {"file_name": "one.png", "caption": ["a cat", "one cat", "a cat", ""], "score": float("nan"), "big": [1e999, 1]},
    {"file_name": "sub\\two.png", "caption": "first"},
    {"file_name": "sub/two.png", "caption": "second"},
    {"file_name": unicodedata.normalize("NFC", "ü.png"), "caption": "composed"},
    {"file_name": "gone.png", "caption": "gone"},
    {"file_name": "../../away.png", "caption": "away"},
    {"caption": "nameless"},
    {"file_name": "list.npy", "caption": "none"},
]
IN_ROWS = ("one.png", "sub/two.png", unicodedata.normalize("NFD", "ü.png"))


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {name: data for name, (data, _) in {**PICTURES, **SKIPPED}.items()} | CAPTIONS
    files |= {os.path.splitext(name)[0] + ".txt": b"a picture" for name in PICTURES}
    files |= {name.partition(".")[0] + ".png": PNG for name in CAPTIONS}
    files |= {f"train/{name}": PNG for name in IN_ROWS} | {"train/list.npy": b"x"}
    files["train/metadata.jsonl"] = "\n".join([*map(json.dumps, ROWS), "{"]).encode()
    for name, data in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "in"


def files_in(folder: Path) -> int:
    return sum(not path.is_dir() for path in folder.rglob("*"))


def samples_of(path: str) -> dict[str, dict[str, bytes]]:
    """The members of each sample by its file_name."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            samples.setdefault(key, {})[kind] = tar.extractfile(member).read()
    return {json.loads(each["json"])["file_name"]: each for each in samples.values()}


def test_every_file_is_packed_or_skipped_for_a_reason_that_is_said_everywhere(source):
    config = PackingConfig(source="in", out_dir="out", max_pixels=80_000)
    lines = folder_command(config)
    report = json.loads(Path("out/report.json").read_text())
    assert report["files"] == files_in(source)
    assert sum(report["packed"].values()) + sum(report["skipped"].values()) == report["files"]
    expected = {name: reason.value for name, (_, reason) in SKIPPED.items()} | {"train/list.npy": Reason.OTHER.value}
    found = {entry["file_name"]: entry["reason"].partition(":")[0] for entry in report["skipped_files"]}
    assert found == expected
    assert set(SKIPPED_REASONS) == {reason.value for reason in Reason} - NOT_HERE
    assert report["skipped_rows"] == {
        "named in the metadata, but missing": 1,
        "outside the folder": 1,
        "has no file_name": 1,
        "names a file that is not read as a picture": 1,
        "is not a JSON object": 1,
    }
    assert report["notes"]["several frames or pages, of which the first is used"] == 4
    assert report["notes"]["color profile, converted to sRGB"] == 2
    assert report["notes"]["color profile that cannot be used, ignored"] == 1
    assert {report["notes"][note] for note in ("CMYK", "16-bit gray", "transparent, on white")} == {1}
    assert report["notes"]["GIF, converted to PNG"] == 2
    counts = report_lines(report)
    assert lines[1:-1] == counts
    inspected, _ = inspect_shards(InspectionConfig(("out",)))
    assert [line.removeprefix("  ") for line in inspected[3 : 3 + len(counts)]] == counts
    assert "2 images: color profile, converted to sRGB" in inspected
    assert f"decoded {report['written']} samples: 0 broken" in inspected


SKIPPED_REASONS = {reason.value for _, reason in SKIPPED.values()}
#: Links and other systems' names are in ``test_packing.py``; metadata without a use below.
ELSEWHERE = (Reason.OUTSIDE, Reason.NO_FILE, Reason.BAD_NAME, Reason.TOO_LONG)
NOT_HERE = {each.value for each in (*ELSEWHERE, Reason.NO_HEIF, Reason.METADATA_NOT_UTF8, Reason.METADATA_UNUSED)}


def test_pictures_and_captions_of_every_kind_come_out_of_the_shards(source):
    pack_folder(PackingConfig(source="in", out_dir="out", max_pixels=80_000))
    samples = samples_of("out/00000.tar")
    for name, (data, kind) in PICTURES.items():
        members = samples[name]
        assert set(members) == {kind, "txt", "json"}, name
        kept = kind != "png" or (name.endswith(".png") and not name.startswith("animated"))
        assert (members[kind] == data) == kept, name
        with Image.open(io.BytesIO(data)) as image:
            assert (json.loads(members["json"])["width"], json.loads(members["json"])["height"]) == image.size
    exact = np.asarray(random_image())
    for name in ("animated.webp", "animated.png", "pages.tiff", "windows.bmp", "old.tga"):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(samples[name]["png"]))), exact, err_msg=name)
    captions = {"utf16.png": "a café", "bom.png": "a café", "upper.png": "upper", "kohya.png": "kohya"}
    captions |= {
        "double.png": "double",
        "train/one.png": "a cat",
        "train/sub/two.png": "first",
        "plain.png": "a picture",
    }
    captions[f"train/{IN_ROWS[2]}"] = "composed"
    assert {name: samples[name]["txt"].decode() for name in captions} == captions
    one, two = (json.loads(samples[f"train/{name}.png"]["json"]) for name in ("one", "sub/two"))
    assert one["captions"] == ["a cat", "one cat"] and two["captions"] == ["first", "second"]
    assert b"NaN" not in samples["train/one.png"]["json"] and (one["score"], one["big"]) == (None, [None, 1])
    spec = SampleSpec(ImageSpec((8, 8)), (CaptionSpec(Letters(), 9),))
    data = load("out", spec, caption_field='["json", "captions"]')
    drawn = set(captions_of(data.batch_at(range(4 * data.samples))))
    assert drawn == {"a cat", "one cat", "first", "second", *captions.values()} and not data.broken


def test_captions_of_all_rows_count_and_other_separators_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("in/a", "in/b"):
        Path(folder).mkdir(parents=True)
    Path("in/a/1.png").write_bytes(PNG)
    Path("in/a/metadata.csv").write_bytes(b'"file_name";caption;note\n1.png;a cat;ok\n')
    Path("in/b/metadata.csv").write_text("file_name\tcaption\n1.png\ta dog\n")
    Path("in/metadata.jsonl").write_text(json.dumps({"file_name": str(tmp_path / "in/a/1.png"), "caption": "one cat"}))
    report = pack_folder(PackingConfig(source="in", out_dir="out"))
    assert report["packed"] == {"picture": 1, "metadata file": 2}
    assert report["skipped"] == {"metadata without a row of a packed picture": 1}
    record = json.loads(samples_of("out/00000.tar")["a/1.png"]["json"])
    assert record["captions"] == ["a cat", "one cat"] and record["note"] == "ok"
    Path("in/metadata.jsonl").write_bytes('{"file_name": "a/1.png", "caption": "café"}'.encode("cp1252"))
    with refused(r"none of the 1 images .* its caption is not UTF-8 \(a/1.png\)"):
        pack_folder(PackingConfig(source="in", out_dir="again"))


def test_files_that_cannot_be_read_are_skipped_and_links_not_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in/sub").mkdir(parents=True)
    Path("away").mkdir()
    for name in ("in/sub/1.png", "away/2.png"):
        Path(name).write_bytes(PNG)
    Path("in/sub/1.txt").write_text("one")
    Path("in/away").symlink_to(Path("away").absolute())
    Path("in/sub/around").symlink_to(Path("in").absolute())
    Path("in/nowhere.png").symlink_to(Path("in/gone.png").absolute())
    os.mkfifo("in/pipe.jpg")
    monkeypatch.setitem(packing.MAX_BYTES, IMAGE, 50_000)
    Path("in/long.png").write_bytes(bytes(50_001))
    report = pack_folder(PackingConfig(source="in", out_dir="out"))
    found = {entry["file_name"]: entry["reason"] for entry in report["skipped_files"]}
    assert found == {
        "away": "outside the folder",
        "nowhere.png": "no file that can be read",
        "pipe.jpg": "no file that can be read",
        "long.png": "a file of too many bytes: more than 50,000",
    }
    assert report["files"] == 6 and report["written"] == 1


def test_dots_in_the_names_of_members_are_explained(tmp_path):
    files = [(f"photo_v1.{i}.{kind}", data) for i in range(3) for kind, data in (("png", PNG), ("txt", b"a cat"))]
    make_tar(tmp_path / "0.tar", files)
    words = r"6 members have names such as NAME\.0\.(png|txt): a sample's key ends at the first dot"
    with refused(words):
        load(tmp_path, SampleSpec(ImageSpec((8, 8))))
    lines, _ = inspect_shards(InspectionConfig((str(tmp_path),)))
    assert re.match(words, lines[2])


def test_a_report_of_another_form_is_not_believed(tmp_path):
    make_tar(tmp_path / "0.tar", [("0.png", PNG), ("0.txt", b"a cat")])
    good = {"files": 2, "packed": {"picture": 1}, "skipped": {"no caption": 1}, "skipped_rows": {}, "notes": {}}
    good["skipped_files"] = [{"file_name": "b.png", "reason": "no caption"}]
    cases = [
        b"",
        b"[]",
        b"{",
        b"\xff",
        *(
            json.dumps({**good, name: value}).encode()
            for name, value in (
                *(("files", "1"), ("files", 1.5), ("packed", {"picture": "x"}), ("notes", []), ("skipped_files", [{}])),
                ("skipped_files", [*good["skipped_files"], {"file_name": 3, "reason": "another"}]),
            )
        ),
    ]
    for data in cases:
        (tmp_path / "report.json").write_bytes(data)
        assert not any(line.startswith("packed into") for line in inspect_shards(InspectionConfig((str(tmp_path),)))[0])
    (tmp_path / "report.json").write_text(json.dumps(good))
    assert (
        "  2 files in the folder: 1 picture packed, 1 skipped" in inspect_shards(InspectionConfig((str(tmp_path),)))[0]
    )
