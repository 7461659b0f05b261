"""Where captions come from, and what is no caption."""

import pytest
from shard_making import sample, tar_bytes

from diff_dalle.data.caption_list import read_captions
from diff_dalle.data.captions import read_caption
from diff_dalle.errors import InputError
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
    (tmp_path / "a.tar").write_bytes(tar_bytes([*sample("0", " "), *sample("1", "a star")]))
    (tmp_path / "b.tar").write_bytes(tar_bytes([*sample("0", " "), *sample("1", "\n")]))
    assert read_captions([str(tmp_path / "a.tar")], "txt") == ["a star"]
    with pytest.raises(InputError, match=r"b\.tar holds no caption that is neither empty nor unreadable"):
        read_captions([str(tmp_path / "b.tar")], "txt")
