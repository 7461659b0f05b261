import json
import logging
import pickle
import re

import numpy as np
import pytest
import torch
from refusing import refused
from shard_making import Letters, captions_of, encoded, load, make_tar, random_image

from diff_dalle.commands.command_line import parse
from diff_dalle.config import InputError, from_dict, to_dict
from diff_dalle.data import filters, survey
from diff_dalle.data.filters import Filter, Verdict, parse_filters
from diff_dalle.data.inspection import InspectionConfig, inspect_shards
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import CaptionSpec, ImageSpec, SampleSpec
from diff_dalle.recipes.generator import GeneratorRun

# ---------------------------------------------------------------------------------------------------- the language

RECORD = {"score": 5.0, "nsfw": 0.001, "w": 640, "h": 480, "caption": "a red cat", "tags": ["cat", "red"], "none": None}
RECORD |= {"aesthetic score": 6, "flag": True, "größe": 3}


TRUE = """
score > 4.5
score >= 5
score <= 5
score == 5
4 < score < 6
480 <= h < w
score > 4.5 and nsfw < 0.01
score > 9 or nsfw < 0.01
not score > 9
w * h >= 640 * 480
w / h > 1.33
w - h == 160 and w + h == 1120
-score < +0
len(tags) == 2
'cat' in caption
"dog" not in tags
h in (480, 512)
none == None
flag == True
größe == 3
["score", "lambda s: s > 4.5"]
["aesthetic score", "lambda x: 5 < x and x < 7"]
[["w", "h"], "lambda a, b: a > b"]
[["w"], "lambda a: a"]
"""
FALSE = """
score > 5
score < 5
score != 5
4 < score < 5
6 < score < 7
score > 4.5 and nsfw > 0.01
score > 9 or nsfw > 0.01
not flag
w / h > 1.34
len(caption) < 9
h in [512, 768]
["score", "lambda s: s > 5"]
[["h", "w"], "lambda a, b: a > b"]
"""


@pytest.mark.parametrize("text", TRUE.strip().splitlines() + FALSE.strip().splitlines())
def test_filters_mean_what_python_means(text):
    found, expected = Filter.parse(text), text in TRUE.splitlines()
    assert found.verdict(RECORD) == (Verdict.ACCEPTED if expected else Verdict.REFUSED)
    values = {name: RECORD[key] for name, key in zip(found.names, found.keys, strict=True)}
    source = json.loads(text)[1].partition(":")[2] if text.startswith("[") else text
    assert bool(eval(source.strip(), {"len": len}, values)) == expected


WRONG_TYPE = """
none > 4
caption > 4
score / 0 > 4
len(score) > 4
'a' in score
caption * 9 == 'a'
tags + tags == tags
"""


def test_what_cannot_be_decided_is_rejected_with_its_reason():
    for text in ("missing > 4", "score > 4 or missing > 4"):
        assert Filter.parse(text).verdict(RECORD) == Verdict.NO_KEY
    for text in WRONG_TYPE.strip().splitlines():
        assert Filter.parse(text).verdict(RECORD) == Verdict.WRONG_TYPE, text


def test_a_json_that_cannot_be_read_is_rejected():
    asked = [Filter.parse("score > 4")]
    assert filters.verdicts(asked, None) == [Verdict.NO_JSON]
    assert filters.verdicts(asked, b"{") == filters.verdicts(asked, b"[1]") == [Verdict.NO_JSON]
    assert filters.verdicts(asked, b"[" * 100_000) == [Verdict.NO_JSON]
    assert filters.verdicts(asked, b'{"score": 5}') == [Verdict.ACCEPTED]


UNKNOWN = r"""
score.real > 1 | has 'score.real' at character 1, but a filter has only comparisons
w > 1 and tags[0] == 1 | 'tags[0]' at character 11
größe > 1 and h.b | 'h.b' at character 15
__import__("os").system("true") | at character 1, but
open(w) | 'open(w)' at character 1
len(*w) | 'len(*w)'
len(w, h) | 'len(w, h)'
len(w, a=h) | 'len(w, a=h)'
w ** 9 > 1 | 'w ** 9'
w % 2 == 1 | 'w % 2'
w << 9 | 'w << 9'
w is None | 'w is None'
~w | '~w'
w if h else 1 | a filter has only
[a for a in w] | a filter has only
(w := 4) | a filter has only
f'{w}' | a filter has only
w > 1j | '1j' at character 5
w == b'a' | a filter has only
{w: 1} | a filter has only
["w", "lambda w: (lambda: w)()"] | a filter has only
score > | is no expression (invalid syntax at character 8)
score > 1; w | is no expression (invalid syntax at character 10)
1 > 0 | names no key
lambda s: s > 4 | does not say its keys: write [KEY, "lambda s: s > 4"]
["w", "w > 4"] | must be a lambda of w, such as
["w", "lambda s: t > 1"] | the name 't' at character 11, but its lambda takes s
["w", "lambda s, t: s > 1"] | takes 2 values, but there are 1 keys: w
[["w", "h"], "lambda s: s > 1"] | takes 1 values, but there are 2 keys: w, h
["w", "lambda s=1: s"] | plain parameters
["w", "lambda *s: s"] | plain parameters
["w"] | must be an expression, [KEY, LAMBDA]
[1, "lambda s: s"] | must be an expression
[[], "lambda: 1"] | must be an expression
"""
LONG = [
    ("-" * 990 + "w", "more than 24 expressions"),
    ("+".join(["w"] * 400), "more than 24 expressions"),
    ("(" * 300 + "w" + ")" * 300, "is no expression"),
    ("not " * 24 + "w", "more than 24 expressions within each other at character 97"),
    ("w > " + "1" * 1000, "has an expression of 1,004 characters, but at most 1,000"),
]


@pytest.mark.parametrize(("text", "message"), [*LONG, *(line.split(" | ") for line in UNKNOWN.strip().splitlines())])
def test_what_the_language_has_not_is_refused_with_its_place(text, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        Filter.parse(text)
    assert str(caught.value).startswith("dataset_filters") and "\n" not in str(caught.value)


def test_nothing_of_a_filter_is_run(tmp_path):
    """Also not while it is parsed, and no number is folded."""
    for text in (f"open({str(tmp_path / 'a')!r}, 'w')", "w > 9 * 9 * 9"):
        try:
            Filter.parse(text)
        except InputError:
            assert "open" in text
    assert not list(tmp_path.iterdir())


def test_filters_of_equal_meaning_have_one_fingerprint():
    one = Filter.parse('["score", "lambda s: s > 4.5"]')
    assert one.fingerprint == Filter.parse('["score",  "lambda s:  (s > 4.5)"]').fingerprint
    others = ('["score", "lambda s: s > 4.6"]', '["nsfw", "lambda s: s > 4.5"]', "score < 4.5", "score > 4.5 or w")
    assert len({one.fingerprint, *(Filter.parse(text).fingerprint for text in others)}) == 5
    assert pickle.loads(pickle.dumps(one)).fingerprint == one.fingerprint
    with refused("'w  > 1' twice"):
        parse_filters(["w > 1", "w  > 1"])


# --------------------------------------------------------------------------------------------------- the setting


def test_pairs_of_a_file_and_texts_of_a_flag_are_the_same():
    pairs = [["aesthetic_score", "lambda s: s > 4.5"], [["width", "height"], "lambda w, h: w > h"], "nsfw < 0.01"]
    found = from_dict(DataConfig, {"dataset_filters": pairs})
    assert [each.keys for each in parse_filters(found.dataset_filters)] == [
        ("aesthetic_score",),
        ("width", "height"),
        ("nsfw",),
    ]
    assert from_dict(DataConfig, to_dict(found)) == found
    flag = ",".join(found.dataset_filters)
    run = parse(GeneratorRun, ["--data_dir", "d", "--dataset_filters", flag])
    assert run.data.dataset_filters == found.dataset_filters
    for listed in (found.dataset_filters[:2], found.dataset_filters[1:2]):  # as a file writes it
        run = parse(GeneratorRun, ["--data_dir", "d", "--dataset_filters", f" [{', '.join(listed)}]"])
        assert run.data.dataset_filters == listed
    run = parse(GeneratorRun, ["--data_dir", "d", "--dataset_filters", "w in (1, 2), c == 'a,b(', d > 1"])
    assert run.data.dataset_filters == ("w in (1, 2)", "c == 'a,b('", "d > 1")
    assert parse(GeneratorRun, ["--data_dir", "d", "--dataset_filters", "none"]).data.dataset_filters == ()


def test_a_wrong_filter_stops_before_anything_is_read():
    with refused(r"dataset_filters: 'score >' is no expression"):
        DataConfig(dataset_filters=("score >",))
    with refused("dataset_filters"):
        from_dict(DataConfig, {"dataset_filters": {"score": 1}})


# ------------------------------------------------------------------------------------------------------- the data

SPEC = SampleSpec(ImageSpec((16, 16)), (CaptionSpec(Letters(), 20),))


def record_of(number: int) -> bytes:
    return json.dumps({"score": number, "width": 24} if number % 7 else {"width": 24}).encode()


@pytest.fixture
def shards(tmp_path):
    """40 samples in three shards; every 7th has no score, 13 has no json, 15 one that is none, and 39 no image."""
    number = 0
    for shard, count in enumerate((17, 9, 14)):
        files = []
        for i in range(number, number + count):
            members = {
                "jpg": encoded(random_image(seed=i)),
                "json": b"{" if i == 15 else record_of(i),
                "txt": f"caption of {i:04d}".encode(),
            }
            left_out = {13: "json", 39: "jpg"}.get(i)
            files += [(f"{i:04d}.{kind}", data) for kind, data in members.items() if kind != left_out]
        make_tar(tmp_path / f"{shard}.tar", files)
        number += count
    return tmp_path


def loader(folder, *texts, **options) -> Loader:
    return load(folder, SPEC, dataset_filters=texts, streams=1, **options)


def numbers(batch) -> list[int]:
    return [int(caption[-4:]) for caption in captions_of(batch)]


def test_rejected_samples_are_not_in_the_order_and_each_other_is_there_once_per_epoch(shards, caplog):
    data = loader(shards, "score > 9", '["score", "lambda s: s < 30"]', batch_size=1, seed=4)
    expected = [i for i in range(10, 30) if i % 7 and i not in (13, 15)]
    assert data.samples == len(expected) == data.order.samples
    for epoch in range(3):
        found = numbers(data.batch_at(range(epoch * data.samples, (epoch + 1) * data.samples)))
        assert sorted(found) == expected and found != expected
    plain = loader(shards, shuffle=False)
    sharing = {number: plain.batch_at([number]).images for number in expected[:4]}
    caplog.clear()
    kept = loader(shards, "score > 9", "width == 24", shuffle=False)
    assert [record.getMessage() for record in caplog.records if "filter" in record.getMessage()] == SAID
    for place, number in enumerate(expected[:4]):
        assert torch.equal(kept.batch_at([place]).images, sharing[number])
    assert kept.describe(0).endswith("0.tar : 0010")
    assert (data.seen, data.broken, data.rejected) == (3 * data.samples, 0, {})


# Of 39 samples with image and caption: 0 to 9 less 0 and 7 have a score below 10; 0, 7, 14, 21, 28, 35 have none.
REASONS = "8 by their values, 2 without a readable .json, 6 without the key"
SAID = [
    f"filter 'score > 9': rejects 16 of 39 samples ({REASONS})",
    "filter 'width == 24': rejects 2 of 39 samples (2 without a readable .json)",
]


def test_a_filter_that_rejects_all_samples_is_named(shards):
    with refused("rejects all samples: filter 'score > 99': rejects 39 of 39"):
        loader(shards, "width == 24", "score > 99")
    message = r"filter 'score > 30': .* \(2.*; with the other filters it leaves none; change it"
    with refused(message):
        loader(shards, "score > 30", "score < 10")


def test_the_json_members_are_read_once(shards, monkeypatch):
    first = loader(shards, "score > 9")
    asked = []
    monkeypatch.setattr(survey, "verdicts", lambda filters, data: asked.append(filters) or [0] * len(filters))
    assert (loader(shards, "score > 9").collection.counts == first.collection.counts).all() and not asked
    loader(shards, '["score", "lambda s: s > 9"]', "score > 9")  # the first has another fingerprint
    assert {len(each) for each in asked} == {1} and len(asked) == 40


def test_an_index_from_before_there_were_filters_is_extended(shards):
    loader(shards)
    tables = {path: path.read_bytes() for path in (shards / ".diff_dalle_index").glob("?.tar.npz")}
    assert len(tables) == 3
    assert loader(shards, "score > 9").samples < 39
    assert {path: path.read_bytes() for path in tables} == tables


@pytest.mark.parametrize("change", ["damaged", "of another shard", "impossible", "rewritten"])
def test_kept_verdicts_are_not_believed_blindly(shards, change):
    expected = loader(shards, "score > 9").collection.counts.tolist()
    columns = sorted((shards / ".diff_dalle_index").glob("*.filter-*.npz"))
    assert len(columns) == 3
    if change == "damaged":
        columns[0].write_bytes(columns[0].read_bytes()[:-30])
    elif change == "of another shard":
        columns[0].write_bytes(columns[1].read_bytes())
    elif change == "impossible":
        with np.load(columns[0]) as file:
            arrays = dict(file)
        np.savez(columns[0], **{**arrays, "values": arrays["values"] + 200})
        expected[0] = 0
    else:
        tar = (shards / "0.tar").read_bytes().replace(b'"score": 16,', b'"score": 06,')
        (shards / "0.tar").write_bytes(tar.replace(b'"score": 12,', b'"score": 2, '))
        expected[0] -= 2  # the other is not valid json any more
    assert loader(shards, "score > 9").collection.counts.tolist() == expected


def test_a_collection_with_filters_can_be_sent_to_workers(shards):
    found = loader(shards, "score > 9").collection
    copy = pickle.loads(pickle.dumps(found))
    assert copy.key(1, 0) == found.key(1, 0) and copy.counts.tolist() == found.counts.tolist()


def test_the_folder_of_the_index_may_be_elsewhere(shards, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    assert loader(shards, "score > 9", index_cache=str(cache)).samples == loader(shards, "score > 9").samples
    assert len(list(cache.rglob("*.filter-*.npz"))) == 3


def test_what_cannot_be_kept_is_said_once_and_found_again(shards, caplog, monkeypatch):
    def refuse(path, *_):
        raise InputError(f"{path} cannot be written: permission denied")

    monkeypatch.setattr(survey, "save_column", refuse)
    with caplog.at_level(logging.WARNING):
        assert loader(shards, "score > 9").samples == 23
    assert sum("found out again at the next start" in record.getMessage() for record in caplog.records) == 1


def test_pipes_are_read_from_their_copy(shards, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    data = loader(f"pipe:cat {shards}/0.tar", "score > 9", index_cache=cache, shard_cache=cache)
    assert data.samples == loader(shards, "score > 9").collection.counts[0] == 4


def test_inspection_counts_what_each_filter_rejects(shards):
    found = inspect_shards(InspectionConfig((str(shards),), dataset_filters=("score > 9", "width == 24")))
    assert found[1] is not None
    assert found[0][3:6] == [*SAID, "23 samples left by the filters"]
    assert "decoded 23 samples: 0 broken" in found[0]
    lines, grid = inspect_shards(InspectionConfig((str(shards),), dataset_filters=("score > 99",)))
    assert grid is None and lines[-1] == "0 samples left by the filters"
