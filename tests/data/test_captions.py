"""Where captions come from, and what is no caption."""

import json

import pytest
from refusing import refused
from shard_making import Letters, captions_of, load, make_tar, sample

from diff_dalle import storage
from diff_dalle.config import from_dict
from diff_dalle.data.captions import caption_kind, is_drawn, read_caption
from diff_dalle.data.inspection import read_captions
from diff_dalle.data.loader import DataConfig
from diff_dalle.data.spec import CaptionSpec, SampleSpec
from diff_dalle.images.decode import BrokenSample


def test_captions_are_texts_or_fields_of_a_json():
    assert read_caption("\ufeff a star\n".encode(), "txt") == "a star"
    assert read_caption(b'{"caption": " a star "}', "json:caption") == "a star"
    for data, field in ((b" \n", "txt"), (b'{"caption": " "}', "json:caption")):
        with pytest.raises(BrokenSample, match="empty"):
            read_caption(data, field)
    for data in (b'{"other": "a"}', b'{"caption": 3}'):
        with pytest.raises(BrokenSample, match="no text under 'caption'"):
            read_caption(data, "json:caption")


def test_shards_without_a_usable_caption_are_refused(tmp_path):
    make_tar(tmp_path / "a.tar", [*sample("0", " "), *sample("1", "a star")])
    make_tar(tmp_path / "b.tar", [*sample("0", " "), *sample("1", "\n")])
    assert read_captions([str(tmp_path / "a.tar")], "txt") == ["a star"]
    with refused(r"b\.tar holds no caption that is neither empty nor unreadable"):
        read_captions([str(tmp_path / "b.tar")], "txt")


OLD = json.dumps({"og_caption": "a star of old"})


def test_captions_are_got_by_name():
    """The original caption comes with probability .05, when it is there and the caller draws."""
    data = json.dumps({"caption": "a new star", "old_caption": OLD}).encode()
    for field in ('["json", "old_caption"]', '["json", "captions_getter"]'):
        assert caption_kind(field) == "json"
        assert read_caption(data, field) == read_caption(data, field, chance=lambda: 0.0501) == "a new star"
        assert read_caption(data, field, chance=lambda: 0.0499) == "a star of old"
    assert read_caption(b" a star", '["txt", "identity"]') == "a star" and caption_kind('["TXT", "identity"]') == "txt"
    for old in ("", "{", "[]", '{"og_caption": " "}', '{"og_caption": 3}', '{"caption": "b"}', 3, None):
        data = json.dumps({"caption": "a new star", "old_caption": old}).encode()
        assert read_caption(data, '["json", "old_caption"]', chance=lambda: 0.0) == "a new star"
    with pytest.raises(BrokenSample, match="no text under 'caption'"):
        read_caption(json.dumps({"old_caption": OLD}).encode(), '["json", "old_caption"]', chance=lambda: 1.0)


def test_one_of_several_captions_is_drawn():
    data, field = json.dumps({"captions": ["a star", " ", "stars"]}).encode(), '["json", "captions"]'
    assert caption_kind(field) == "json" and read_caption(data, field) == "a star"
    assert [read_caption(data, field, chance=lambda chance=c: chance) for c in (0.0, 0.33, 0.67, 0.999)] == [
        "a star",
        "a star",
        "stars",
        "stars",
    ]
    with pytest.raises(BrokenSample, match="its caption is empty"):
        read_caption(data, field, chance=lambda: 0.5)
    for captions in ([], "a star", None, {"0": "a star"}, [3]):
        with pytest.raises(BrokenSample, match="its json has no"):
            read_caption(json.dumps({"captions": captions}).encode(), field)


def test_one_of_the_captions_in_a_list_under_any_field_is_drawn():
    data = json.dumps({"text": ["a star", "stars"], "none": []}).encode()
    assert [read_caption(data, "json:text", chance=lambda chance=c: chance) for c in (0.49, 0.51)] == [
        "a star",
        "stars",
    ]
    assert read_caption(data, "json:text") == "a star"
    with pytest.raises(BrokenSample, match="its json has no text under 'none'"):
        read_caption(data, "json:none")


def test_it_can_be_told_whether_a_caption_is_drawn():
    several, old = {"captions": [" ", "stars"]}, {"caption": "a star", "old_caption": OLD}
    for content, field, drawn in (
        (several, '["json", "captions"]', True),
        (several, "json:captions", True),
        (old, '["json", "old_caption"]', True),
        ({"caption": "a star"}, '["json", "old_caption"]', False),
        (old, "json:caption", False),
    ):
        assert is_drawn(json.dumps(content).encode(), field) == drawn
    assert not is_drawn(b"a star", "txt")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_says_how_to_decode(encoding, tmp_path):
    text = "a man’s café"
    assert read_caption(text.encode(encoding), "txt") == text
    assert read_caption(json.dumps({"caption": text}, ensure_ascii=False).encode(encoding), "json:caption") == text
    (tmp_path / "prompts.txt").write_bytes(f"{text}\n".encode(encoding))
    assert storage.read_text(str(tmp_path / "prompts.txt")) == f"{text}\n"


BIG_ENDIAN = b"\xfe\xff\0x", b"\0\0\xfe\xff\0\0\0x"


def test_captions_in_other_encodings_are_broken_samples_and_prompts_refused(tmp_path, caplog):
    assert {read_caption(data, "txt") for data in BIG_ENDIAN} == {"x"}
    cases = {
        "a man’s café".encode("cp1252"): "caption is not UTF-8",
        "赤い猫".encode("shift_jis"): "caption is not UTF-8",
    }
    cases |= {"a cat".encode("utf-16-le"): "its caption holds a NUL character", b"\xff\xfea": "caption is not UTF-8"}
    for caption, reason in cases.items():
        with pytest.raises(BrokenSample, match=reason):
            read_caption(caption, "txt")
    with pytest.raises(BrokenSample, match="caption is not UTF-8"):
        read_caption(b'{"caption": "half \\ud83d"}', "json:caption")
    with pytest.raises(BrokenSample, match="its json is not UTF-8"):
        read_caption('{"caption": "café"}'.encode("cp1252"), "json:caption")
    make_tar(tmp_path / "0.tar", [("0.txt", "café".encode("cp1252")), ("1.txt", b"a cat")])
    data = load(tmp_path, SampleSpec(captions=(CaptionSpec(Letters(), 8),)))
    assert set(captions_of(data.batch_at(range(4)))) == {"a cat"} and data.broken == 1
    assert "0: its caption is not UTF-8" in caplog.text
    (tmp_path / "prompts.txt").write_bytes("café".encode("cp1252"))
    with refused("prompts.txt is not a UTF-8 text file: save it as UTF-8"):
        storage.read_text(str(tmp_path / "prompts.txt"))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            '["json", "captions_geter"]',
            "'captions_geter', but must have one of identity, captions, old_caption; .*captions",
        ),
        ('["json", "caption"]', "a field of the json is written json:FIELD"),
        ('["txt", "old_caption"]', "reads old_caption from 'txt'"),
        ('["txt", "captions"]', "reads captions from 'txt'"),
        ('["txt"]', r"must be a pair \[EXTENSION, NAME\]"),
        ("[txt, identity]", r"must be a pair \[EXTENSION, NAME\]"),
        ('["", "identity"]', r"must be a pair"),
    ],
)
def test_unknown_ways_to_get_captions_are_refused(field, message):
    with refused(message):
        DataConfig(caption_field=field)
    listed = from_dict(DataConfig, {"caption_field": ["json", "old_caption"]})  # as a file spells it
    assert listed == DataConfig(caption_field='["json", "old_caption"]')


def test_which_caption_comes_follows_from_the_position(tmp_path):
    record = json.dumps({"caption": "new", "old_caption": OLD.replace("a star of old", "old")}).encode()
    files = [(f"{i:03d}.json", record) for i in range(50)]
    make_tar(tmp_path / "a.tar", files)

    def captions(seed=1, positions=range(1000), **options):
        spec = SampleSpec(captions=(CaptionSpec(Letters(), 8),))
        data = load(tmp_path, spec, seed, caption_field='["json", "old_caption"]', **options)
        return captions_of(data.batch_at(positions))

    found = captions()
    assert found == captions() and found[300:310] == captions(positions=range(300, 310))
    assert set(found) == {"old", "new"} and 25 <= found.count("old") <= 80
    assert found != captions(2) and set(captions(augment=False)) == {"new"}
