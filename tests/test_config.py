import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from diff_dalle.commands.command_line import ALIASES, by_name, flag_table, parse, preset_names, preset_text
from diff_dalle.config import differences, disagreements, dump, expectations, from_dict, option, section, to_dict
from diff_dalle.errors import InputError


@dataclass(frozen=True)
class Model:
    """Network"""

    num_channels: int = option(128, "channels")
    channel_mult: tuple[float, ...] = option((1.0, 2.0), "factors")
    variance: str = option("fixed_large", "kind", choices=("fixed_large", "fixed_small", "learned_range"))


@dataclass(frozen=True)
class Training:
    """Training"""

    lr: float = option(3e-4, "rate")
    data_dir: tuple[str, ...] = option((), "shards", free=True)
    limit: int | None = option(None, "limit")
    flip: bool = option(False, "flip")


@dataclass(frozen=True)
class Run:
    model: Model = section(Model)
    training: Training = section(Training)


def from_text(text, *flags):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return parse(Run, ["--config", str(path), *flags])


def test_precedence_is_defaults_then_file_then_flags():
    config = from_text("lr: 1e-3\nmodel: {num_channels: 64}", "--num_channels", "32")
    assert (config.training.lr, config.model.num_channels, config.training.flip) == (1e-3, 32, False)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--flip"], ("flip", True)),
        (["--flip", "False"], ("flip", False)),
        (["--limit", "none"], ("limit", None)),
        (["--limit", "7"], ("limit", 7)),
        (["--data_dir", "none"], ("data_dir", ())),
        (["--data_dir", "a/{000..010,12}.tar,b"], ("data_dir", ("a/{000..010,12}.tar", "b"))),
    ],
)
def test_flag_values(flags, expected):
    assert getattr(parse(Run, flags).training, expected[0]) == expected[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_chanels", "3"], ["--num_chanels", "did you mean --num_channels"]),
        (["--lr", "fast"], ["--lr", "'fast'", "number"]),
        (["--lr", "1", "--lr", "2"], ["--lr", "2 times"]),
        (["--variance", "learned"], ["--variance", "learned_range"]),
        (["--num", "3"], ["unknown flag"]),
        (["stray"], ["stray"]),
        (["--preset", "nothing"], ["preset", "nothing"]),
        (["--config", "a", "--config", "b"], ["--config", "2 times"]),
        (["--dry_run", "ture"], ["--dry_run", "ture", "True or False"]),
    ],
)
def test_bad_flags_stop_with_one_sentence(flags, words):
    with pytest.raises(InputError) as error:
        parse(Run, flags)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 1\nlr: 2", ["lr", "twice", "line 2"]),
        ("lr: 1\ntraining: {lr: 2}", ["lr 2.0", "1.0 was asked for too"]),
        ("training: {num_channels: 2}", ["num_channels", "belongs under model"]),
        ("model: {learn_sigma: true, variance: fixed_small}", ["variance", "learned_range", "fixed_small"]),
        ("modle: {num_channels: 2}", ["modle"]),
        ("num_channels: 1.5", ["num_channels", "1.5", "integer"]),
        ("num_channels: true", ["num_channels", "integer"]),
        ("variance: no", ["variance", "text"]),
        ("lr: {{rate}: 1}", ["not valid YAML"]),
        ("lr: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
        ("- 3", ["name: value"]),
    ],
)
def test_bad_files_stop_with_one_sentence(text, words):
    with pytest.raises(InputError) as error:
        from_text(text)
    assert all(word in str(error.value) for word in words)


def test_aliases_set_and_unset_their_field():
    assert parse(Run, ["--learn_sigma", "True"]).model.variance == "learned_range"
    assert from_text("variance: learned_range", "--learn_sigma", "False").model.variance == "fixed_large"
    assert from_text("variance: fixed_small", "--learn_sigma", "False").model.variance == "fixed_small"
    assert parse(Run, ["--index_dir", "x"]).training.data_dir == ("x",)


@pytest.mark.parametrize("other", [["--sigma_small", "True"], ["--variance", "fixed_small"]])
def test_contradicting_aliases_are_refused(other):
    with pytest.raises(InputError, match="variance"):
        parse(Run, ["--learn_sigma", "True", *other])
    with pytest.raises(InputError, match="variance"):
        parse(Run, ["--variance", "learned_range", "--learn_sigma", "False"])


def test_aliases_may_agree_and_may_override_an_earlier_source():
    assert from_text("learn_sigma: true\nsigma_small: false").model.variance == "learned_range"
    assert from_text("learn_sigma: true", "--sigma_small", "True").model.variance == "fixed_small"
    assert parse(Run, ["--variance", "learned_range", "--learn_sigma", "True"]).model.variance == "learned_range"


def test_dict_and_yaml_round_trip():
    config = parse(Run, ["--channel_mult", "0.5,1", "--data_dir", "a,b", "--limit", "3"])
    assert from_dict(Run, to_dict(config)) == config
    assert from_text(dump(config)) == config


def test_unknown_nested_key_names_the_nearest():
    with pytest.raises(InputError, match="model.num_chanels; did you mean num_channels"):
        from_dict(Run, {"model": {"num_chanels": 3}})


def test_differences_leave_out_free_settings():
    changed = parse(Run, ["--lr", "1e-3", "--data_dir", "elsewhere"])
    assert differences(to_dict(Run()), to_dict(changed), Run) == ["lr (0.0003 → 0.001)"]


def test_two_sections_cannot_share_a_name():
    clash = dataclasses.make_dataclass("Clash", [("lr", float, option(1.0, "x")), ("t", Training, section(Training))])
    with pytest.raises(TypeError, match="lr"):
        by_name(clash)


def test_dry_run_prints_the_resolved_config(capsys):
    with pytest.raises(SystemExit) as leave:
        parse(Run, ["--dry_run", "--lr", "0.5"])
    assert leave.value.code == 0
    assert from_text(capsys.readouterr().out).training.lr == 0.5


def test_help_and_table_name_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse(Run, ["--help"])
    text, table = capsys.readouterr().out, flag_table(Run)
    for name in by_name(Run):
        assert f"--{name}" in text and f"--{name}" in table
    assert all(f"--{old}" in text for old in ALIASES if ALIASES[old].field in by_name(Run))


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_where_they_come_from(name):
    assert "Source:" in preset_text(name) and "Expect:" in preset_text(name)


def test_expectations_name_what_disagrees():
    expected = expectations(Run, "Checks", leave_out=("flip",))
    flags = parse(expected, ["--num_channels", "64", "--lr", "0.5"])
    assert flags.data_dir is None
    config = parse(Run, ["--lr", "0.5"])
    assert disagreements(flags, config) == ["num_channels (64 asked for, 128 in the checkpoint)"]
    with pytest.raises(InputError, match="--flip"):
        parse(expected, ["--flip"])
