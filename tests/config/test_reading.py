"""Whole files: everything that is wrong at once, each with its path and line."""

import json
from dataclasses import dataclass, replace

import pytest
from config_making import Clip, Crop, Fitting, Stages, UNet, WholeFile, from_text

from diff_dalle.commands.command_line import groups, parse
from diff_dalle.commands.flag_tables import flag_table
from diff_dalle.config import (
    differences,
    dump,
    entries,
    from_dict,
    from_file,
    from_value,
    leaves,
    option,
    section,
    shown,
    to_dict,
)
from diff_dalle.config.declaration import Leaf
from diff_dalle.config.values import checked
from diff_dalle.errors import InputError

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
    with pytest.raises(InputError) as error:
        from_text(WholeFile, text, *flags)
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
        "run.yaml has 12 errors:",
        "  stages.unets[0].dimm (line 3): unknown setting; did you mean dim?",
        "  stages.unets[0].dim (line 4): unets[0].dim is 5, but must be even",
        "  stages.unets[1].dim (line 5): dim is 0, but must be at least 1",
        "  stages.unets[2].dim (line 6): dim is 'x', but must be an integer",
        "  stages.clp (line 7): unknown setting; did you mean clip?",
        "  stages.loss (line 8): loss is 'l3', but must be one of l1, l2",
        "  fitting.lr (line 10): lr is 'fast', but must be a number",
        "  fitting.mask (line 11): fitting.mask has 2 values, but must have 1 or 3",
        "  fitting.crops.rondom.name (line 13): name is 'rondom', but must be one of center, random, whole; did you "
        "mean random?",
        "  fitting.crops.center.sise (line 14): unknown setting; did you mean size?",
        "  sede (line 15): unknown setting; did you mean seed?",
        "  lr (line 16): unknown setting; it belongs under fitting",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: {unets: [{dim: 2}]}\nfitting: {mask: [true, false]}",
         "run.yaml: fitting.mask (line 2): fitting.mask has 2 values, but must have 1 or 1"),
        ("seed: 3", "run.yaml: stages.unets: unets is required"),
        ("seed: 3\nstages: {}", "run.yaml: stages.unets (line 2): unets is required"),
        ("stages: 3", "run.yaml has 2 errors:\n  stages (line 1): stages is 3, but must be a mapping of settings"),
        ("stages: {unets: {dim: 3}}", "unets is {'dim': 3}, but must be a list of sections"),
        ("stages: {unets: [{}, 4]}", "  stages.unets[1] (line 1): [1] is 4, but must be a mapping of settings"),
        ("stages: {unets: [], clip: 3}", "stages.clip (line 1): clip is 3, but must be a mapping of settings"),
        ("stages: {unets: []}\nfitting: {crops: {random: 3}}", "crops.random is 3, but must be a mapping of settings"),
        ("stages: {unets: []}\nfitting: {crops: {random: {name: whole}}}", "crops.random has the setting name, which"),
        ("stages: {unets: [], clip: {weights: 3}}", "clip.weights (line 1): weights follow from make: leave them out"),
        ("stages: {unets: []}\nfitting: {crops: 3}", "fitting.crops (line 2): crops is 3, but must be a list"),
        ('stages: {unets: []}\n"a\\nb": 3', "  'a\\nb' (line 2)"),
    ],
)  # fmt: skip
def test_single_errors(text, message):
    assert message.removeprefix("  ") in "\n".join(errors_of(text))


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
    assert line == "run.yaml: stages.unets[1].dim (--set): unets[1].dim is 7, but must be even"
    (line,) = errors_of(GOOD, "--set", "stages.unets.1.dim=x")
    assert line == "--set stages.unets.1.dim is 'x', but must be an integer"
    (line,) = errors_of("stages: {unets: 3}", "--set", "stages.unets.1.dim=7")
    assert line == "--set stages.unets.1.dim: stages.unets is 3, but must be a list of sections"


def test_a_refusal_in_a_mapping_has_the_path():
    with pytest.raises(InputError, match=r"^stages\.clip\.weights follow from make: leave them out"):
        from_dict(WholeFile, {"stages": {"unets": [], "clip": {"weights": 3}}})


def test_the_first_of_several_errors_is_that_of_a_mapping():
    """The check of the whole fails, and the default of a section too, which the mapping has."""

    @dataclass(frozen=True)
    class Part:
        side: int = option(0, "pixels")

        def __post_init__(self):
            if not self.side:
                raise InputError("side is required")

    @dataclass(frozen=True)
    class Whole:
        part: Part = section(Part)

        def __post_init__(self):
            raise InputError("the whole is wrong")

    with pytest.raises(InputError, match="^the whole is wrong"):
        from_dict(Whole, {"part": {"side": 3}})
    with pytest.raises(InputError, match="^side is required"):
        from_dict(Whole, {"part": {}})


def test_lists_may_have_empty_places():
    assert from_dict(Stages, {"unets": [], "crops": [None, 3]}).crops == (None, 3) and shown((None, 3)) == "none,3"
    with pytest.raises(InputError, match="crops is 'x', but must be comma-separated integers or none"):
        from_dict(Stages, {"unets": [], "crops": "x"})


def test_sections_without_flags_have_none():
    assert {leaf.name for leaf in leaves(WholeFile) if leaf.has_flag} == {"seed"}
    with pytest.raises(InputError, match="unknown flag or argument '--lr'"):
        parse(WholeFile, ["--lr", "1"])
    with pytest.raises(InputError, match=r"the command line: stages\.unets: unets is required"):
        parse(WholeFile, [])
    rows = flag_table(WholeFile)
    for name in ("--set stages.unets.N.dim", "--set stages.clip.side", "--set fitting.lr", "--seed"):
        assert f"| `{name}` |" in rows, rows
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
        '{"sida": 8}': "params.sida: unknown setting; did you mean side?",
        '{"side": "x"}': "params.side: side is 'x', but must be an integer",
        '{"weights": 3}': "params.weights: weights follow from make: leave them out",
    }.items():
        with pytest.raises(InputError) as found:
            from_value(Clip, json.loads(value), "params")
        assert str(found.value) == message
    assert from_value(Clip, {"side": 8}, "params") == Clip(side=8)


def test_keys_of_the_root_are_told_as_the_file_has_them():
    """Also what a check says about a part of a nested text, which it labels with its path."""

    @dataclass(frozen=True)
    class Part:
        params: str = option("{}", "parameters", nested=True)
        side: int = option(0, "pixels")

    @dataclass(frozen=True)
    class Whole:
        part: Part = section(Part)

        def __post_init__(self):
            if "z" in self.part.params:
                raise InputError("part.params.z: unknown setting")

    homes = {"params": ("part", "params"), "side": ("part", "side")}
    at_root = {("params",): "line 1", ("params", "z"): "line 2", ("side",): "line 3"}
    in_part = {("part",): "line 1", ("part", "params"): "line 2"}
    for part, places, expected in (
        ({"params": {"z": 1}}, at_root, "params.z (line 2): unknown setting"),
        ({"params": {"z": 1}}, in_part, "part.params.z (line 2): unknown setting"),
        ({"side": "x"}, at_root, "side (line 3): side is 'x', but must be an integer"),
    ):
        with pytest.raises(InputError) as found:
            from_file(Whole, {"part": part}, places, "f", homes)
        assert str(found.value) == f"f: {expected}"


def test_a_mapping_may_take_the_place_of_a_nested_text():
    """It stands for its JSON text, which is read back as such."""
    leaf = Leaf(("params",), str, "{}", "", nested=True)
    text = checked(leaf, {"resize": 224, "sides": [1, 2]}, False, "params")
    assert text == '{"resize": 224, "sides": [1, 2]}' and checked(leaf, text, False, "params") == text
    with pytest.raises(InputError, match="params is"):
        checked(replace(leaf, nested=False), {"resize": 224}, False, "params")
