"""The emoji world: names and parts from code points, what is held out, and shards."""

import json
import re
import tarfile

import numpy as np
import pytest
from emoji_making import Painter, people, use_painter

from diff_dalle.config import InputError
from diff_dalle.worlds.emoji import font, names, world
from diff_dalle.worlds.emoji.names import ADULT, TONES, WHO, Emoji
from diff_dalle.worlds.emoji.world import EmojiConfig, split_emoji

#: As the package names them, by code points.
NAMES = {
    "1f680": ":rocket:",
    "1f468-200d-1f680": ":man_astronaut:",
    "1f469-1f3fd-200d-1f680": ":woman_astronaut_medium_skin_tone:",
    "1f9d1-200d-1f680": ":astronaut:",
    "1f3c3-1f3ff": ":person_running_dark_skin_tone:",
    "1f3c3-1f3ff-200d-2642-fe0f": ":man_running_dark_skin_tone:",
    "1f44b-1f3fb": ":waving_hand_light_skin_tone:",
    "1f9d1-1f3fd-200d-1f91d-200d-1f9d1-1f3fb": ":people_holding_hands_medium_skin_tone_light_skin_tone:",
    "1f1f2-1f1f3": ":Mongolia:",
    "1f3f4-e0067-e0062-e0065-e006e-e0067-e007f": ":England:",
    "1f3f4-200d-2620-fe0f": ":pirate_flag:",
}
PARTS = {
    "rocket": ("", ()),
    "man astronaut": ("man", ()),
    "woman astronaut medium skin tone": ("woman", ("medium",)),
    "astronaut": ("person", ()),
    "person running dark skin tone": ("person", ("dark",)),
    "man running dark skin tone": ("man", ("dark",)),
    "waving hand light skin tone": ("", ("light",)),
    "people holding hands medium skin tone light skin tone": ("", ("medium", "light")),
    "flag: Mongolia": ("", ()),
    "flag: England": ("", ()),
    "pirate flag": ("", ()),
}
#: Other names that the package has.
OTHERS = {":rocket:": [":rocket_ship:", ":ROCKET:"], ":Mongolia:": [":flag_for_Mongolia:", ":mongolia:"]}
CAPTIONS = {
    "rocket": ("rocket", "rocket ship", "a rocket"),
    "astronaut": ("astronaut", "an astronaut"),
    "woman astronaut medium skin tone": ("woman astronaut medium skin tone", "a woman astronaut medium skin tone"),
    "people holding hands medium skin tone light skin tone": ("people holding hands medium skin tone light skin tone",),
    "flag: Mongolia": ("flag: Mongolia", "flag for Mongolia", "mongolia"),
}


def sequence(code: str) -> str:
    return "".join(chr(int(each, 16)) for each in code.split("-"))


def described() -> list[Emoji]:
    return list(names._described({sequence(code): [name, *OTHERS.get(name, ())] for code, name in NAMES.items()}))


def test_who_what_and_tones_come_from_the_code_points():
    found = described()
    assert {each.name: (each.who, each.tones) for each in found} == PARTS
    what = {each.name: each.what for each in found}
    assert what["man astronaut"] == what["woman astronaut medium skin tone"] == what["astronaut"]
    assert what["man running dark skin tone"] == what["person running dark skin tone"] == "\U0001f3c3"
    assert len(set(what.values())) == len(NAMES) - 3


def test_captions_are_the_name_and_what_people_write():
    found = {each.name: each.captions for each in described()}
    assert all(captions[0] == name for name, captions in found.items())
    assert {name: found[name] for name in CAPTIONS} == CAPTIONS
    assert names._captions("smiling cat with heart-eyes", ["heart eyes cat"])[1:] == (
        "heart eyes cat",
        "a smiling cat with heart-eyes",
        "smiling cat with heart eyes",
        "a smiling cat with heart eyes",
    )
    for name in ("men with bunny ears", "chopsticks", "flag: Norway", "people hugging"):
        assert names._captions(name, []) == (name,)


def test_an_emoji_survives_its_record():
    for each in described():
        record = json.loads(json.dumps(vars(each)))
        assert Emoji.parse(record) == each
        for change in ({"tones": ["blue"]}, {"name": 3}, {"more": 1}, {"tones": "dark"}, {"captions": [1]}):
            with pytest.raises(ValueError, match="not the parts of an emoji"):
                Emoji.parse({**record, **change})


# ---------------------------------------------------------------------------------------------------- what is held out


def test_held_out_combinations_are_pairs_whose_parts_remain():
    everyone = people(100)
    splits = split_emoji(EmojiConfig(held_out_combinations=0.1), everyone)
    held = {(each.who, each.what) for each in splits["combinations"]}
    assert len(splits["combinations"]) == len(TONES) * len(held)  # in all skin tones
    assert len({what for _, what in held}) == len(held) and ADULT not in {what for _, what in held}
    assert 0.05 < len(held) / 300 < 0.15 and {who for who, _ in held} == set(WHO)
    rest = [each for each in everyone if (each.who, each.what) not in held]
    assert sorted(map(repr, splits["train"] + splits["names"])) == sorted(map(repr, rest))
    assert 0.02 < len(splits["names"]) / len(rest) < 0.09


def test_a_split_depends_on_the_emoji_and_the_seed_only():
    everyone = people(30)
    splits = split_emoji(EmojiConfig(), everyone)
    fewer = split_emoji(EmojiConfig(), everyone[::-3])
    assert all(set(fewer[name]) <= set(splits[name]) for name in splits)
    assert split_emoji(EmojiConfig(seed=1), everyone) != splits


@pytest.mark.parametrize("wrong", [{"held_out": 0.0}, {"held_out_combinations": 0.4}, {"image_size": 4}])
def test_impossible_settings_are_refused(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(InputError, match=f"{name} is {value:g}, but must"):
        EmojiConfig(**wrong)


# --------------------------------------------------------------------------------------------------- pictures and files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    use_painter(monkeypatch, people(20) + described())
    config = EmojiConfig(image_size=16, held_out_combinations=0.2, samples_per_shard=100)
    return config, tmp_path / "emoji", world.EmojiWorld(config, "font").write(str(tmp_path / "emoji"))


def test_shards_hold_what_they_are_read_as(folder):
    config, path, report = folder
    assert world.EmojiWorld.read(str(path)) == config
    expected = split_emoji(config, [each for each, _ in Painter().distinct(people(20) + described())])
    for split, members in expected.items():
        emoji, pictures = world.read_emoji(str(path), split)
        assert emoji == members and report[split]["samples"] == len(members)
        assert pictures.shape == (len(members), 16, 16, 3) and pictures.dtype == np.uint8
        for each, picture in zip(emoji, pictures, strict=True):
            assert np.array_equal(picture, font.square_of(Painter().draw(each.sequence), 16))
    assert "rocket" not in {each.name for each in world.read_emoji(str(path), "train")[0]}
    with tarfile.open(path / "train" / "emoji-train-00000.tar") as tar:
        assert {name.split(".")[-1] for name in tar.getnames()} == {"png", "txt", "json"}


def test_an_unfinished_folder_is_continued_and_another_refused(folder):
    config, path, report = folder
    (path / "names" / "emoji-names-00000.tar").unlink()
    assert world.EmojiWorld(config, "font").write(str(path)) == report
    assert (path / "names" / "emoji-names-00000.tar").exists()
    with pytest.raises(InputError, match="contains an emoji world with different settings"):
        world.EmojiWorld(EmojiConfig(image_size=20), "font").write(str(path))
    with pytest.raises(InputError, match=r"is not an emoji world: emoji\.json is missing"):
        world.read_emoji(str(path / "train"), "names")


def test_a_folder_goes_on_with_its_own_font_and_names_only(folder, monkeypatch):
    config, path, report = folder
    (path / "names" / "emoji-names-00000.tar").unlink()
    with pytest.raises(InputError, match="made with the font font, which is other now: go on with that, or choose"):
        world.EmojiWorld(config, "other").write(str(path))
    monkeypatch.setattr(world, "names_version", lambda: "2.1")
    with pytest.raises(InputError, match=r"made with the package emoji 2\.0, which is 2\.1 now"):
        world.EmojiWorld(config, "font").write(str(path))
    record = path / world.EmojiWorld.record()
    tree = json.loads(record.read_text())
    del tree["made_with"]  # of an earlier version
    record.write_text(json.dumps(tree))
    assert world.EmojiWorld(config, "other").write(str(path)) == report and world.EmojiWorld.read(str(path)) == config


def test_equal_pictures_are_taken_once():
    twice = [Emoji(text, text, "", text, ()) for text in ("ab", "ba", "abc")]
    assert [each.name for each, _ in Painter().distinct(twice)] == ["ab", "abc"]


def test_a_missing_font_and_one_without_color_are_explained(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"font is .*none\.ttf', but must be a file"):
        font.find_font(str(tmp_path / "none.ttf"))
    monkeypatch.setattr(font, "FOLDERS", (str(tmp_path),))
    with pytest.raises(InputError, match="apt install fonts-noto-color-emoji"):
        font.find_font()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / font.FONT).write_bytes(b"no font")
    assert font.find_font() == str(tmp_path / "deep" / font.FONT)
    with pytest.raises(InputError, match="must be a font of color bitmaps"):
        font.Renderer(font.find_font())


def test_the_font_of_this_machine():
    pytest.importorskip("emoji")
    try:
        renderer = font.Renderer(font.find_font())
    except InputError as reason:
        pytest.skip(str(reason))
    everything = names.recommended()
    named = {each.name: each for each in everything}
    assert re.fullmatch(r"sha256:[0-9a-f]{16}", renderer.identity) and names.names_version()
    hand = np.asarray(renderer.draw(named["waving hand dark skin tone"].sequence))
    assert hand.shape[0] == hand.shape[1] and hand.shape[2] == 3 and (hand[0] == 255).all()
    assert np.abs(hand.astype(int) - (114, 84, 75)).sum(2).min() < 10  # Noto's darkest skin
    assert renderer.draw("\U0001f680\U0001f680") is None  # two pictures
    assert renderer.draw("\ue000") is None  # not in the font
    assert len(everything) > 3500 and sum(len(each.tones) == 1 for each in everything) > 1400
