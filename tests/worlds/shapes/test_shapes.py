"""The shapes world: scenes are pure functions of an index, captions are true, held-out objects stay out."""

import hashlib
import io
import itertools
import json
import re
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.prepare import COMMANDS
from diff_dalle.config import InputError
from diff_dalle.worlds.contract import AT_ONCE
from diff_dalle.worlds.shapes import scenes as shapes
from diff_dalle.worlds.shapes.captions import HELD_OUT_PHRASING, PHRASINGS, caption, phrasing_key, training_caption
from diff_dalle.worlds.shapes.render import render
from diff_dalle.worlds.shapes.scenes import (
    BACKGROUNDS,
    COLORS,
    OPPOSITE,
    POSITIONS,
    SHAPES,
    ShapesConfig,
    scene,
    scene_size,
)
from diff_dalle.worlds.shapes.shards import ShapesWorld, read_shapes_config, write_shapes

SMALL = ShapesConfig(train_samples=7, val_samples=2, samples_per_shard=3)
EVERYTHING = ShapesConfig(
    backgrounds=tuple(BACKGROUNDS), shapes=SHAPES, colors=tuple(COLORS), positions=tuple(POSITIONS)
)
CONFIGS = {"default": ShapesConfig(), "everything": EVERYTHING}

# ------------------------------------------------------- an independent reading of captions, from their wording alone

OBJECT = rf"(?:an? )?(?:(?P<size>small|large) )?(?:(?P<color>{'|'.join(COLORS)}) )?(?P<shape>{'|'.join(SHAPES)})"
WHERE = r"(?:in the (?P<cell>(?:top|bottom) (?:left|right)|center)|(?:at|on) the (?P<side>top|bottom|left|right))"
MEANING = {
    "to the left of": "left of", "left of": "left of", "to the right of": "right of", "right of": "right of",
    "above": "above", "over": "above", "below": "below", "under": "below",
}  # fmt: skip


def numbered(pattern: str, n: int) -> str:
    return re.sub(r"\?P<(\w+)>", rf"?P<\g<1>{n}>", pattern)


def read(text: str) -> dict:
    """What a caption claims: objects as (size, color, shape) with None for what is not said, and the rest by name."""
    claim = {"background": None, "relation": None, "position": None, "number": None}
    behind = re.search(rf" on a ({'|'.join(BACKGROUNDS)}) background$", text)
    if behind:
        claim["background"], text = behind[1], text[: behind.start()]
    looks = re.fullmatch(rf"the (?P<shape>\w+) {WHERE} is (?:(?P<size>small|large) and )?(?P<color>\w+)", text)
    text = re.sub(r"^(a picture of|there is|there are) ", "", text)
    many = re.fullmatch(rf"(?P<number>two|three) {OBJECT}e?s", text)
    pair = re.fullmatch(rf"{numbered(OBJECT, 1)} (?P<how>and|{'|'.join(MEANING)}) {numbered(OBJECT, 2)}", text)
    single = re.fullmatch(rf"{OBJECT}(?: {WHERE})?", text) or re.fullmatch(rf"{WHERE} (?:there )?is {OBJECT}", text)
    match = looks or many or pair or single
    assert match, text
    found = match.groupdict()
    if pair:
        claim["objects"] = [tuple(found[f"{field}{n}"] for field in ("size", "color", "shape")) for n in (1, 2)]
        claim["relation"] = MEANING.get(found["how"])
        return claim
    claim["number"] = {"two": 2, "three": 3}.get(found.get("number"))
    claim["objects"] = [tuple(found[field] for field in ("size", "color", "shape"))] * (claim["number"] or 1)
    claim["position"] = found.get("cell") or found.get("side")
    return claim


def assert_true(text: str, truth: shapes.Scene) -> None:
    claim, objects, relation = read(text), truth.objects, truth.relation
    assert len(claim["objects"]) == len(objects), text
    if truth.kind == "pair" and claim["objects"][0][2] != objects[0].shape:
        objects, relation = objects[::-1], OPPOSITE[relation]
    for said, item in zip(claim["objects"], objects, strict=True):
        for word, fact in zip(said, (item.size, item.color, item.shape), strict=True):
            assert word in (None, fact), text
    assert claim["background"] in (None, truth.background), text
    assert claim["relation"] in (None, relation), text
    assert claim["position"] in (None, objects[0].position), text


@pytest.mark.parametrize("name", CONFIGS)
def test_training_captions_are_true(name):
    """1 000 captions, read by another grammar, agree with their scenes; each attribute is said in some, not in all."""
    config, claims = CONFIGS[name], []
    for i in range(1000):
        truth = scene(config, i)
        text = training_caption(config, truth, i)
        assert_true(text, truth)
        size, color, _ = read(text)["objects"][0]
        claims.append({**read(text), "size": size, "color": color})
    for field in ("size", "color", "background", "relation", "position", "number"):
        assert {claim[field] is None for claim in claims} == {True, False}, field


@pytest.mark.parametrize("name", CONFIGS)
def test_every_phrasing_with_every_choice_of_attributes_reads_back(name):
    """Each template, each subset of what can be said, swapped or not: exactly the said attributes are recovered."""
    config = CONFIGS[name]
    own = {"single": ["position"], "pair": ["relation"], "count": []}
    for kind in ("single", "pair", "count"):
        truth = next(s for s in (scene(config, i) for i in itertools.count()) if s.kind == kind)
        can = ["size", "color", "background", *own[kind]]
        for bits in itertools.product((False, True), repeat=len(can)):
            say = {field for field, bit in zip(can, bits, strict=True) if bit}
            for phrasing, swap in itertools.product(PHRASINGS[phrasing_key(truth, say)], (False, True)):
                text = caption(truth, phrasing, say, swap=swap, variant=int(swap))
                assert_true(text, truth)
                claim = read(text)
                named = {field for field in ("background", "relation", "position") if claim[field]}
                named |= {f for f, word in zip(("size", "color"), claim["objects"][0][:2], strict=True) if word}
                assert named == say, text


def test_held_out_phrasing_says_the_truth_in_known_words_and_is_never_trained():
    """Its wording reads back; all its words occur in training captions; no training caption has its form."""
    config = ShapesConfig(pair_fraction=0, count_fraction=0)
    say, texts = {"color", "size", "position"}, [training_caption(config, scene(config, i), i) for i in range(1500)]
    known = {word for text in texts for word in text.split()} | {"and"}  # "and" joins pairs, which are off here
    for i in range(200):
        truth = scene(config, i)
        text = caption(truth, HELD_OUT_PHRASING, say)
        assert_true(text, truth)
        assert set(text.split()) <= known
    assert not any(text.startswith("the ") for text in texts)


@pytest.mark.parametrize("split", ["train", "val"])
def test_held_out_pairs_are_neither_drawn_nor_named(split):
    """Over 1 500 scenes no held-out pair appears, and every other pair does."""
    config, drawn = ShapesConfig(), set()
    banned = re.compile("|".join(config.held_out))
    for i in range(1500):
        content = scene(config, i, split)
        drawn |= {f"{item.color} {item.shape}" for item in content.objects}
        assert not banned.search(training_caption(config, content, i, split))
    every = {f"{color} {shape}" for color, shape in itertools.product(config.colors, config.shapes)}
    assert drawn == every - set(config.held_out)


def test_a_sample_depends_on_seed_split_and_index_alone():
    """Any order of access gives the same scene, caption and pixels; another seed, split or index gives another."""
    config = ShapesConfig()
    forwards = [scene(config, i) for i in range(50)]
    assert [scene(config, i) for i in reversed(range(50))] == forwards[::-1]
    assert np.array_equal(render(forwards[7]), render(scene(config, 7)))
    assert training_caption(config, forwards[7], 7) == training_caption(config, scene(config, 7), 7)
    others = [scene(ShapesConfig(seed=1), 7), scene(config, 7, "val"), scene(config, 8)]
    assert all(other != forwards[7] for other in others)


def test_kinds_come_in_the_fractions_asked_for():
    """2 000 scenes: pairs and counts within five standard errors of their fractions."""
    config = ShapesConfig(pair_fraction=0.4, count_fraction=0.2)
    kinds = [scene(config, i).kind for i in range(2000)]
    for kind, share in (("pair", 0.4), ("count", 0.2)):
        assert abs(kinds.count(kind) / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5


def test_a_lone_size_is_never_named():
    """With one size to draw no caption mentions size."""
    config = ShapesConfig(sizes=("large",), say_size=1.0)
    assert not any("large" in training_caption(config, scene(config, i), i) for i in range(200))


def test_colors_are_far_from_each_other_and_from_backgrounds():
    """The palette keeps the distance that its comment promises."""
    tones = [np.array(tone) for tone in COLORS.values()]
    others = [np.array(tone) for tone in BACKGROUNDS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(tones, 2)) >= 100
    assert min(np.linalg.norm(a - b) for a, b in itertools.product(tones, others)) >= 100


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"shapes": ("circle", "sqare")}, "did you mean square"),
        ({"colors": ()}, "colors is none"),
        ({"positions": ("top", "top")}, "each once"),
        ({"held_out": ("red hexagon",)}, "red hexagon"),
        ({"held_out": tuple(f"red {shape}" for shape in SHAPES[:4])}, "nothing red"),
        ({"pair_fraction": 0.8, "count_fraction": 0.3}, "more than 1"),
        ({"say_size": 1.5}, "say_size is 1.5, but must be at least 0 and at most 1"),
        ({"max_count": 5}, "max_count is 5, but must be at least 2 and at most 3"),
        ({"jitter": 0.2}, "jitter is 0.2, but must"),
        ({"train_samples": 0}, "train_samples is 0, but must be at least 1"),
        ({"shapes": ("circle",), "held_out": ()}, "pair_fraction needs objects"),
        ({"aspect_ratios": ()}, "aspect_ratios is none"),
        ({"aspect_ratios": ("1/1", "2:1")}, "aspect_ratios has '2:1', but a ratio is WIDTH/HEIGHT"),
        (
            {"aspect_ratios": ("1/1", "5/1")},
            "image_size is 32, but all sides must have at least 16 pixels, .* makes some of 14",
        ),
    ],
)
def test_impossible_worlds_are_refused(settings, word):
    """Each bad setting is named in one sentence, before anything is drawn."""
    with pytest.raises(InputError, match=word):
        ShapesConfig(**settings)


GOLDEN = {  # SHA-256 of the first 256 images and captions of each split, of ShapesConfig()
    "train": (
        "a31201ddb00fa972c28c6a81a6dabc33c260af8d1a2c616bb955c4103c87bf83",
        "7bbfe16a3e0c46297805fdcca8195bd68f412036ca439489af4a021b7464f96c",
    ),
    "val": (
        "cd0e7f452169b8f501f649752b459fafe6a9d1df0d22abaa8549dce86881fecf",
        "76df7190e3bfc3729a0cb1f064b3661441ddf38167ad0605b2476133ad777beb",
    ),
}


@pytest.mark.parametrize("split", GOLDEN)
def test_images_and_captions_never_change(split):
    """The same settings give the same bytes in every version: models in use were trained on them."""
    config, images, captions = ShapesConfig(), hashlib.sha256(), hashlib.sha256()
    for i in range(256):
        content = scene(config, i, split)
        images.update(render(content, config.image_size).tobytes())
        captions.update(f"{training_caption(config, content, i, split)}\n".encode())
    assert (images.hexdigest(), captions.hexdigest()) == GOLDEN[split]


def contents(folder) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*/*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                found[f"{path.parent.name}/{member.name}"] = tar.extractfile(member).read()
    return found


def test_shards_hold_what_the_world_says(tmp_path):
    """Every sample has its png, txt and json; the json is the scene, the png its render, the txt its caption."""
    report = write_shapes(SMALL, str(tmp_path))
    assert report["train"]["shards"] == 3 and report["train"]["samples"] == 7 and report["val"]["samples"] == 2
    found = contents(tmp_path)
    assert len(found) == 3 * 9
    truth = scene(SMALL, 5)
    described = json.loads(found["train/00000005.json"])
    assert described["objects"][0] == vars(truth.objects[0]) and described["relation"] == truth.relation
    assert described["caption"] == found["train/00000005.txt"].decode() == training_caption(SMALL, truth, 5)
    (tmp_path / "one.png").write_bytes(found["train/00000005.png"])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "one.png")), render(truth))


def test_images_have_one_of_the_aspect_ratios(tmp_path):
    """About equally often, with the pixels of the square; content and captions are those of the square world."""
    config = replace(SMALL, image_size=64, aspect_ratios=("1/1", "2/1", "0.5"))
    sizes = [scene_size(config, i) for i in range(300)]
    counts = {size: sizes.count(size) for size in set(sizes)}
    assert set(counts) == {(64, 64), (45, 91), (91, 45)} and min(counts.values()) > 70
    assert sizes != [scene_size(config, i, "val") for i in range(300)]
    write_shapes(config, str(tmp_path / "a"))
    write_shapes(replace(SMALL, image_size=64), str(tmp_path / "b"))
    found, squares = contents(tmp_path / "a"), contents(tmp_path / "b")
    for name, data in found.items():
        if name.endswith(".png"):
            i, split = int(name.partition("/")[2].partition(".")[0]), name.partition("/")[0]
            expected = render(scene(config, i, split), scene_size(config, i, split))
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), expected)
        else:
            assert data == squares[name]


def test_writing_again_finishes_an_interrupted_folder(tmp_path):
    """A shard that is missing comes back byte for byte; shards already there are left alone."""
    write_shapes(SMALL, str(tmp_path))
    first, second = sorted((tmp_path / "train").glob("*.tar"))[:2]
    before, written = first.read_bytes(), second.stat().st_mtime_ns
    first.unlink()
    write_shapes(SMALL, str(tmp_path))
    assert first.read_bytes() == before and second.stat().st_mtime_ns == written


def test_shards_do_not_depend_on_who_renders_them(tmp_path):
    """Two processes write the same bytes as one, in the same order; more than one is given more than one piece."""
    config = replace(SMALL, image_size=16, train_samples=3 * AT_ONCE, samples_per_shard=2 * AT_ONCE + 5)
    reports = [write_shapes(config, str(tmp_path / str(count)), count) for count in (1, 2)]
    assert reports[0] == reports[1] and reports[0]["train"]["shards"] == 2
    shards = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*.tar"))
    assert shards and all((tmp_path / "1" / s).read_bytes() == (tmp_path / "2" / s).read_bytes() for s in shards)


def test_foreign_folders_are_refused(tmp_path):
    """Shards of another config, or any other files, are never mixed with new ones."""
    write_shapes(SMALL, str(tmp_path / "a"))
    with pytest.raises(InputError, match="different settings"):
        write_shapes(ShapesConfig(seed=3), str(tmp_path / "a"))
    (tmp_path / "a" / ShapesWorld.record()).unlink()
    with pytest.raises(InputError, match="not empty"):
        write_shapes(SMALL, str(tmp_path / "a"))


def rename_as_before(record) -> None:
    """Give a folder's record the names that settings had in earlier versions."""
    text = record.read_text()
    assert '"colors"' in text and '"say_color"' in text
    record.write_text(text.replace('"colors"', '"colours"').replace('"say_color"', '"say_colour"'))


def test_folders_of_earlier_versions_are_read_and_finished(tmp_path):
    """A folder whose shapes.json has the earlier names of settings holds the same world."""
    changed = replace(SMALL, colors=("red", "green", "blue"), held_out=("red circle",), say_color=0.5)
    write_shapes(changed, str(tmp_path))
    before = contents(tmp_path)
    rename_as_before(tmp_path / ShapesWorld.record())
    assert read_shapes_config(str(tmp_path)) == changed
    next((tmp_path / "train").glob("*.tar")).unlink()
    write_shapes(changed, str(tmp_path))
    assert contents(tmp_path) == before
    with pytest.raises(InputError, match="different settings"):
        write_shapes(replace(changed, say_color=0.6), str(tmp_path))


def test_earlier_names_of_settings_are_accepted_as_flags():
    run = parse(COMMANDS["shapes"].config, ["--colours", "red,blue,green", "--say_colour", "0.5", "--held_out", "none"])
    assert run.shapes.colors == ("red", "blue", "green") and run.shapes.say_color == 0.5
