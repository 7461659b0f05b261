import gzip
import sys

import pytest
from refusing import refused

from diff_dalle.config import InputError
from diff_dalle.text import vocabulary
from diff_dalle.text.tokenizer import load_tokenizer
from diff_dalle.text.vocabulary import CLIP_HEADER, CLIP_MERGES, read_vocabulary, write_merge_file

LETTERS = list(vocabulary.BYTE_LETTERS.values())


def clip_like_merges(count):
    """``count`` distinct merges of two letters."""
    return [(LETTERS[i // 256], LETTERS[i % 256]) for i in range(count)]


def test_a_written_file_is_read_back(tmp_path):
    """Plain and compressed; an unknown header is called bpe."""
    merges = [("a", "b"), ("ab", "c</w>"), ("Ġ", "ł</w>")]
    write_merge_file(str(tmp_path / "plain.txt"), "#version: 1", merges)
    (tmp_path / "packed").write_bytes(gzip.compress((tmp_path / "plain.txt").read_bytes()))
    for name in ("plain.txt", "packed"):
        found = read_vocabulary(str(tmp_path / name))
        assert (found.name, list(found.merges)) == ("bpe", merges)
    with refused("does not exist"):
        write_merge_file(str(tmp_path / "no" / "folder"), "#", merges)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "header"),
        (b"a b\nc d\n", "header"),
        (b"#\na b\nab\n", "line 3 is 'ab'"),
        (b"#\na b c\n", "line 2 is 'a b c'"),
        (b"#\na b\n\nc d\n", "line 3 is ''"),
        (b"#\na b\nabc d\n", "line 3 joins 'abc'"),
        (b"#\na b\na b\n", "line 3 produces 'ab' a second time"),
        (b"#\n\xff\xfe\n", "damaged"),
        (b"#" * 1001, "more than"),
        (gzip.compress(b"#" * 10**5, mtime=0), "more than"),
        (gzip.compress(b"#\na b\n" * 50, mtime=0)[:-9], "damaged"),
        (b"\x1f\x8bnot gzip at all", "damaged"),
        (f"{CLIP_HEADER}\na b\n".encode(), "has 1 of CLIP's"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, content, reason):
    """Every kind of damage is refused with its line, and a decompression bomb before it is unpacked."""
    monkeypatch.setattr(vocabulary, "MAX_BYTES", 1000)
    (tmp_path / "merges.txt").write_bytes(content)
    with refused(reason):
        read_vocabulary(str(tmp_path / "merges.txt"))


def test_missing_file(tmp_path):
    with refused(r"bpe_path: .*none\.txt does not exist"):
        read_vocabulary(str(tmp_path / "none.txt"))


@pytest.mark.parametrize("package", ["open_clip", "clip"])
def test_clip_uses_the_file_of_an_installed_package(tmp_path, monkeypatch, package):
    """The first merges of the file give CLIP's 49,408 ids, and the package is not imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    with refused("pip install --no-deps open_clip_torch"):
        read_vocabulary("clip")
    lines = [f"{left} {right}" for left, right in clip_like_merges(CLIP_MERGES)]
    text = "\n".join([CLIP_HEADER, *lines, "not part of CLIP"])
    (folder / vocabulary.CLIP_FILE).write_bytes(gzip.compress(text.encode()))
    tokenizer = load_tokenizer("clip")
    assert (tokenizer.vocab_size, tokenizer.start, tokenizer.end) == (49408, 49406, 49407)
    assert tokenizer.identity.startswith("clip-49408:")


def test_ids_of_the_real_clip():
    """Known ids of CLIP's own tokenizer, where a package that has its file is installed."""
    try:
        tokenizer = load_tokenizer("clip")
    except InputError as error:
        pytest.skip(str(error))
    ids = [49406, 585, 568, 275, 273, 3471, 20507, 261, 1320, 748, 1741, 481, 49407]
    assert tokenizer.encode("It's 42 Cafés&amp;co!! ☃") == ids
