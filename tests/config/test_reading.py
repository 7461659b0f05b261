"""Whole files: everything that is wrong at once, each with its path and line."""

import json
from dataclasses import replace
from typing import ClassVar

import pytest
from config_making import Clip, Crop, Fitting, Stages, UNet, WholeFile, from_text

from diff_dalle.commands.command_line import groups, parse
from diff_dalle.config import (
    Fault,
    InputError,
    differences,
    dump,
    entries,
    from_dict,
    leaves,
    named,
    option,
    section,
    settings,
    shown,
    to_dict,
)
from diff_dalle.config.declaration import Leaf
from diff_dalle.config.values import checked

GOOD = """{
  "stages": {"unets": [{"dim": 4}, {"dim": 6, "mults": [1, 2]}], "clip": {"side": 16}, "crops": [null, 4]},
  // what is trained
  "fitting": {
    "lr": 1e-5,
    "mask": [true, false],
    "crops": {"random": {"size": 16}, "whole": true, "center": false},
    "savers": {"make": "here"},
  },
  "seed": 3, /* the last,
  with a trailing comma */
}"""
BAD = """stages:
  unets:
  - dimm: 3
    dim: 5
  - dim: 0
  - {dim: x}
  clp: {}
  loss: [l2, l3]
fitting:
  lr: fast
  mask: [true, false]
  crops:
    rondom: {size: 3}
    center: {sise: 3}
sede: 3
lr: 3
"""


def errors_of(text: str, *flags: str) -> list[str]:
    return errors_of_class(WholeFile, text, *flags)


def errors_of_class(config_class, text: str, *flags: str) -> list[str]:
    with pytest.raises(InputError) as error:
        from_text(config_class, text, *flags)
    return str(error.value).splitlines()


@pytest.mark.parametrize("flags", [[], ["--seed", "3"]])
def test_a_good_file_is_read(flags):
    config = from_text(WholeFile, GOOD, *flags)
    assert config.stages == Stages((UNet(4), UNet(6)), Clip(side=16), (None, 4))
    crops = (Crop("random", (16,)), Crop("whole"))
    assert config.fitting == Fitting(1e-5, (True, False), crops, (Clip("here"),)) and config.seed == 3
    assert from_dict(WholeFile, to_dict(config)) == config == from_text(WholeFile, dump(config))


def test_all_errors_of_a_file_are_named_with_path_line_and_nearest_key():
    assert errors_of(BAD) == [
        "12 settings are wrong:",
        "  stages.unets[0].dimm (run.yaml, line 3) is an unknown setting; did you mean dim?",
        "  stages.unets[0].dim (run.yaml, line 4) is 5, but must be even",
        "  stages.unets[1].dim (run.yaml, line 5) is 0, but must be at least 1",
        "  stages.unets[2].dim (run.yaml, line 6) is 'x', but must be an integer",
        "  stages.clp (run.yaml, line 7) is an unknown setting; did you mean clip?",
        "  stages.loss (run.yaml, line 8) is 'l3', but must be one of l1, l2",
        "  fitting.lr (run.yaml, line 10) is 'fast', but must be a number",
        "  fitting.mask (run.yaml, line 11) has 2 values, but must have 1 or 3, as stages.unets has",
        "  fitting.crops.rondom.name (run.yaml, line 13) is 'rondom', but must be one of center, random, whole; "
        "did you mean random?",
        "  fitting.crops.center.sise (run.yaml, line 14) is an unknown setting; did you mean size?",
        "  sede (run.yaml, line 15) is an unknown setting; did you mean seed?",
        "  lr (run.yaml, line 16) is an unknown setting; it belongs under fitting",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: {unets: [{dim: 2}]}\nfitting: {mask: [true, false]}",
         "fitting.mask (run.yaml, line 2) has 2 values, but must have 1 or 1"),
        ("seed: 3", "stages.unets (run.yaml) is required"),
        ("seed: 3\nstages: {}", "stages.unets (run.yaml, line 2) is required"),
        ("stages: 3", "2 settings are wrong:\n  stages (run.yaml, line 1) is 3, but must be a mapping of settings"),
        ("stages: {unets: {dim: 3}}", "stages.unets (run.yaml, line 1) is {'dim': 3}, but must be a list of sections"),
        ("stages: {unets: [{}, 4]}", "stages.unets[1] (run.yaml, line 1) is 4, but must be a mapping of settings"),
        ("stages: {unets: [], clip: 3}", "stages.clip (run.yaml, line 1) is 3, but must be a mapping of settings"),
        ("stages: {unets: []}\nfitting: {crops: {random: 3}}", "crops.random (run.yaml, line 2) is 3, but"),
        ("stages: {unets: []}\nfitting: {crops: {random: {name: whole}}}", "crops.random (run.yaml, line 2) has the"),
        ("stages: {unets: [], clip: {weights: 3}}", "clip.weights (run.yaml, line 1) follow from make: leave them out"),
        ("stages: {unets: []}\nfitting: {crops: 3}", "fitting.crops (run.yaml, line 2) is 3, but must be a list"),
        ('stages: {unets: []}\n"a\\nb": 3', "'a\\nb' (run.yaml, line 2)"),
    ],
)  # fmt: skip
def test_single_errors(text, message):
    assert message in "\n".join(errors_of(text))


def test_json_that_cannot_be_read_is_located():
    (line,) = errors_of('{"stages": {"unets": [],\n  "clip": {"make": "x" "side": 3}}}')
    assert line.startswith("run.yaml is not valid YAML or JSON") and line.endswith("(line 2, column 24)")
    (line,) = errors_of("stages: [1")
    assert line.endswith("(line 2)") or line.endswith("(line 1)")


def test_only_json_has_comments_with_slashes():
    assert (
        from_text(WholeFile, "stages: {unets: [], clip: {make: http://a//b}} # //x").stages.clip.make == "http://a//b"
    )
    text = '{"stages": {"unets": [], "clip": {"make": "a // b /* c */ # d"}}} // e'
    assert from_text(WholeFile, text).stages.clip.make == "a // b /* c */ # d"


@pytest.mark.parametrize(
    ("flag", "found"),
    [
        ("stages.unets.1.dim=8", lambda config: config.stages.unets[1].dim == 8),
        ("stages.clip.make=x", lambda config: config.stages.clip == Clip("x", 16)),
        ("stages.clip=none", lambda config: config.stages.clip is None),
        ("fitting.crops.random.size=3,4", lambda config: config.fitting.crops[0] == Crop("random", (3, 4))),
        ("fitting.crops.whole.size=5", lambda config: config.fitting.crops[1] == Crop("whole", (5,))),
        ("fitting.crops.center.size=5", lambda config: config.fitting.crops[2] == Crop("center", (5,))),
        ("fitting.savers.0.side=7", lambda config: config.fitting.savers == (Clip("here", 7),)),
        ("fitting.savers.side=7", lambda config: config.fitting.savers == (Clip("here", 7),)),
        ("fitting.mask=False", lambda config: config.fitting.mask == (False,)),
        ("seed=5", lambda config: config.seed == 5),
    ],
)
def test_set_wins_over_the_file(flag, found):
    assert found(from_text(WholeFile, GOOD, "--set", flag))


def test_set_makes_a_section_that_is_missing():
    assert from_text(WholeFile, "stages: {unets: []}", "--set", "stages.clip.side=8").stages.clip == Clip(side=8)


def test_errors_of_set_are_located_there():
    (line,) = errors_of(GOOD, "--set", "stages.unets.1.dim=7")
    assert line == "--set stages.unets.1.dim is 7, but must be even"
    (line,) = errors_of(GOOD, "--set", "stages.unets.1.dim=x")
    assert line == "--set stages.unets.1.dim is 'x', but must be an integer"
    (line,) = errors_of("stages: {unets: 3}", "--set", "stages.unets.1.dim=7")
    assert line == "--set stages.unets.1.dim: stages.unets is 3, but must be a list of sections"


def test_a_refusal_in_a_mapping_has_the_path():
    with pytest.raises(InputError, match=r"^stages\.clip\.weights follow from make: leave them out"):
        from_dict(WholeFile, {"stages": {"unets": [], "clip": {"weights": 3}}})


def test_every_fault_is_told_once():
    """The check of the whole fails too, also on sections that their own checks have refused."""

    @settings
    class Part:
        side: int = option(0, "pixels", least=1)
        width: int = option(1, "pixels")

        def faults(self):
            yield Fault.of(self, "side", "is told already")
            if self.width % 2:
                yield Fault.of(self, "width", f"must be even, as {named('side')} is")

    @settings
    class Whole:
        part: Part = section(Part)

        def faults(self):
            yield Fault("", f"{named('part.side')} and {named('part.width')} are wrong together")
            self.part.nothing  # noqa: B018  (an error that follows)

    with pytest.raises(InputError) as found:
        from_dict(Whole, {"part": {"width": 3}})
    assert str(found.value).splitlines() == [
        "3 settings are wrong:",
        "  part.side is 0, but must be at least 1",
        "  part.width is 3, but must be even, as part.side is",
        "  part.side and part.width are wrong together",
    ]


def test_lists_may_have_empty_places():
    assert from_dict(Stages, {"unets": [], "crops": [None, 3]}).crops == (None, 3) and shown((None, 3)) == "none,3"
    with pytest.raises(InputError, match="crops is 'x', but must be comma-separated integers or none"):
        from_dict(Stages, {"unets": [], "crops": "x"})


def test_sections_without_flags_have_none():
    assert {leaf.name for leaf in leaves(WholeFile) if leaf.has_flag} == {"seed"}
    with pytest.raises(InputError, match="unknown flag or argument '--lr'"):
        parse(WholeFile, ["--lr", "1"])
    with pytest.raises(InputError, match=r"stages\.unets is required"):
        parse(WholeFile, [])
    assert [len(group.flags) for group in groups(WholeFile)] == [1, 0, 0]


def test_help_names_what_is_set_in_a_file(capsys):
    with pytest.raises(SystemExit):
        parse(WholeFile, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--set stages.NAME=VALUE" in shown and "--set stages.unets.0.NAME=VALUE" in shown
    assert "--set stages.clip.NAME=VALUE" in shown and "lr, mask; in a config file" in shown


def test_a_section_that_may_be_missing_is_compared():
    first, second = (to_dict(WholeFile(Stages(clip=clip))) for clip in (None, Clip(side=8)))
    assert differences(first, second, WholeFile) == ["stages.clip is given (false → true)"]
    third = to_dict(WholeFile(Stages(clip=Clip())))
    assert differences(second, third, WholeFile) == ["stages.clip.side (8 → 32)"]
    assert dict((name, value) for name, _, value in entries(WholeFile, second))["stages.clip.side"] == 8


def test_a_follow_up_of_an_error_is_no_error_of_its_own():
    """The check of the whole runs on sections that their own checks have refused."""
    lines = errors_of("stages: {unets: [{dim: 3}, {dim: 4}]}\nfitting: {mask: [true, true, false]}")
    assert [line.split(" (")[0].strip() for line in lines[1:]] == ["stages.unets[0].dim", "fitting.mask"]


def test_what_is_wrong_in_the_value_of_a_setting_has_its_path():
    for value, message in {
        '{"sida": 8}': "params.sida is an unknown setting; did you mean side?",
        '{"side": "x"}': "params.side is 'x', but must be an integer",
        '{"weights": 3}': "params.weights follow from make: leave them out",
    }.items():
        with pytest.raises(InputError) as found:
            from_dict(Clip, json.loads(value), "params")
        assert str(found.value) == message
    assert from_dict(Clip, {"side": 8}, "params") == Clip(side=8)


@settings
class Params:
    """Parameters"""

    params: str = option("{}", "parameters", nested=True)
    side: int = option(0, "pixels")


@settings
class WithHomes:
    homes: ClassVar = {"params": ("part", "params"), "side": ("part", "side")}

    part: Params = section(Params, flags=False)
    params: str = option("", "of the part", nested=True)
    side: str = option("", "of the part")

    @classmethod
    def completed(cls, tree):
        part = tree.get("part", {}) | {key: tree[key] for key in ("params", "side") if key in tree}
        return {"part": part}

    def faults(self):
        if "z" in self.part.params:
            yield Fault("part.params.z", "is an unknown setting")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params:\n  z: 1", "params.z (run.yaml, line 2) is an unknown setting"),
        ("part:\n  params:\n    z: 1", "part.params.z (run.yaml, line 3) is an unknown setting"),
        ("side: x", "side (run.yaml, line 1) is 'x', but must be an integer"),
    ],
)
def test_keys_of_the_root_are_told_as_the_file_has_them(text, message):
    """Also what a check says about a part of a nested text."""
    assert errors_of_class(WithHomes, text) == [message]


def test_a_mapping_may_take_the_place_of_a_nested_text():
    """It stands for its JSON text, which is read back as such."""
    leaf = Leaf(("params",), str, "{}", "", nested=True)
    text = checked(leaf, {"resize": 224, "sides": [1, 2]}, "params")
    assert text == '{"resize": 224, "sides": [1, 2]}' and checked(leaf, text, "params") == text
    with pytest.raises(InputError, match="params is"):
        checked(replace(leaf, nested=False), {"resize": 224}, "params")
