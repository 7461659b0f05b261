"""Flags, files, presets, ``--set`` and kinds become one config, or one sentence."""

import dataclasses
import itertools
import re
from typing import ClassVar

import pytest
from config_making import Cascade, Model, Run, Sampling, Training, UNet, from_text

from diff_dalle.commands import sources
from diff_dalle.commands.command_line import parse, parse_kind
from diff_dalle.commands.demo.chapters import DemoConfig
from diff_dalle.commands.flag_names import ALIASES, by_name
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config import InputError, option, section, settings
from diff_dalle.recipes.cascade.stages import StageCRun
from diff_dalle.recipes.control import ControlNetRun
from diff_dalle.recipes.generator import GeneratorRun


@settings
class GeneratorLike(Run):
    kind: ClassVar[str] = "generator"


@settings
class ClassifierLike:
    kind: ClassVar[str] = "classifier"

    training: Training = section(Training)


KINDS = {"generator": GeneratorLike, "classifier": ClassifierLike}


def parsed(config, flags):
    return parse(config, flags.split())


def message_of(call, *arguments):
    with pytest.raises(InputError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------------------------- values


def test_precedence_is_defaults_then_file_then_flags():
    config = from_text(Run, "lr: 1e-3\nmodel: {num_channels: 64}", "--num_channels", "32")
    assert (config.training.lr, config.model.num_channels, config.training.flip) == (1e-3, 32, False)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--flip", ("flip", True)),
        ("--flip False", ("flip", False)),
        ("--limit none", ("limit", None)),
        ("--limit 7", ("limit", 7)),
        ("--data_dir none", ("data_dir", ())),
        ("--data_dir a/{000..010,12}.tar,b", ("data_dir", ("a/{000..010,12}.tar", "b"))),
        ("--set training.limit=7", ("limit", 7)),
        ("--set training.limit=none", ("limit", None)),
        ("--set training.data_dir=a=1,b", ("data_dir", ("a=1", "b"))),
        ("--set training.flip=yes", ("flip", True)),
    ],
)
def test_values_of_flags(flags, expected):
    assert getattr(parsed(Run, flags).training, expected[0]) == expected[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {learn_sigma: true, variance: fixed_small}", "but model.variance sets it to fixed_small"),
        ("variance: false", "must be text"),
        ("variance: no", "is 'no', but must be one of fixed_large"),
    ],
)
def test_bad_files_are_one_sentence(text, words):
    assert words in message_of(from_text, Run, text)


def test_aliases_set_and_unset_their_field():
    assert parsed(Run, "--learn_sigma True").model.variance == "learned_range"
    assert from_text(Run, "variance: learned_range", "--learn_sigma", "False").model.variance == "fixed_large"
    assert from_text(Run, "variance: fixed_small", "--learn_sigma", "False").model.variance == "fixed_small"
    assert parsed(Run, "--index_dir x").training.data_dir == ("x",)
    assert "variance" in message_of(parsed, Run, "--variance learned_range --learn_sigma False")


def test_aliases_may_agree_and_may_override_an_earlier_source():
    assert from_text(Run, "learn_sigma: true\nsigma_small: false").model.variance == "learned_range"
    assert from_text(Run, "learn_sigma: true", "--sigma_small", "True").model.variance == "fixed_small"
    assert parsed(Run, "--variance learned_range --learn_sigma True").model.variance == "learned_range"


# ------------------------------------------------------------------------------------------ earlier names and prefixes


def test_earlier_names_are_accepted_everywhere():
    assert parsed(Run, "--width 7").model.num_channels == 7
    assert parsed(Run, "--set model.width=7 --width 7").model.num_channels == 7
    assert from_text(Run, "width: 7").model.num_channels == 7
    assert from_text(Run, "model: {width: 7}", "--num_channels", "8").model.num_channels == 8
    assert parsed(Cascade, "--upsampler_method heun").upsampling.sampler == "heun"
    assert from_text(Cascade, "upsampler_method: heun").upsampling.sampler == "heun"
    config = from_text(Cascade, "upsampling: {method: heun}\nunets: [{start_dim: 3}]")
    assert (config.upsampling.sampler, config.decoder.unets) == ("heun", (UNet(3),))


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", ["--width", "7", "--num_channels", "7"]),
        ("", ["--width", "7", "--set", "model.num_channels=7"]),
        ("width: 7\nmodel: {num_channels: 7}", []),
        ("model: {width: 7, num_channels: 8}", []),
    ],
)
def test_both_names_of_a_setting_are_refused(text, flags):
    call = (from_text, Run, text, *flags) if text else (parse, Run, flags)
    assert " is given twice, under its present and an earlier name" in message_of(*call)


def test_prefixed_sections():
    """Flags and flat keys have the prefix, keys inside the section do not."""
    text = "sampler: heun\nupsampler_eta: 0.25\nupsampling: {sampler: ddim}"
    config = from_text(Cascade, text, "--eta", "0.5")
    assert dataclasses.astuple(config.sampling) == ("heun", 0.5)
    assert dataclasses.astuple(config.upsampling) == ("ddim", 0.25)
    assert parsed(Cascade, "--set upsampling.eta=0.5").upsampling.eta == 0.5
    assert "did you mean --upsampler_sampler" in message_of(parsed, Cascade, "--upsampler_samler heun")
    message = message_of(from_text, Cascade, "upsampling: {upsampler_eta: 1}")
    assert message == "upsampling.upsampler_eta (run.yaml, line 1) is an unknown setting; did you mean eta?"
    assert "upsampling.sampler (run.yaml, line 1) is 'heum'" in message_of(
        from_text, Cascade, "upsampling: {sampler: heum}"
    )
    message = message_of(parsed, Cascade, "--upsampler_eta 1 --set upsampling.eta=2")
    assert message.startswith("--upsampler_eta sets upsampling.eta to 1, but --set upsampling.eta sets it to 2")


@settings
class Shown:
    """Shown"""

    count: int = option(4, "images")
    sampling: Sampling = section(Sampling, called={"eta": "shown_eta", "method": "unused"})


@settings
class Trained:
    """A command in which a name of a section would mean something else."""

    shown: Shown = section(Shown, prefix="the_")
    training: Training = section(Training, called={"lr": "rate"})


def test_settings_of_a_section_may_be_called_otherwise():
    """As flags and flat keys; keys inside the section keep their names."""
    assert {*by_name(Trained)} >= {"the_count", "the_sampler", "the_shown_eta", "rate"}
    assert not {*by_name(Trained)} & {"eta", "the_eta", "lr"}
    assert parsed(Trained, "--the_shown_eta 0.5 --rate 2") == from_text(
        Trained, "shown: {sampling: {eta: 0.5}}\ntraining: {lr: 2}"
    )
    assert from_text(Trained, "the_shown_eta: 0.5\nrate: 2\nshown: {sampling: {eta: 0.5}}").training.lr == 2
    assert from_text(Trained, "shown: {shown_eta: 0.5}").shown.sampling.eta == 0.5
    assert parsed(Trained, "--set shown.sampling.eta=0.5").shown.sampling.eta == 0.5
    assert message_of(parsed, Trained, "--the_shown_eta -1") == "--the_shown_eta is -1, but must be at least 0"
    assert "did you mean --rate" in message_of(parsed, Trained, "--rat 3")
    assert "unknown flag or argument '--eta'" in message_of(parsed, Trained, "--eta 1")
    assert message_of(from_text, Trained, "eta: 1") == "eta (run.yaml, line 1) is an unknown setting"
    message = message_of(from_text, Trained, "shown: {eta: 1}")
    assert message == "shown.eta (run.yaml, line 1) is an unknown setting; it belongs under shown.sampling"
    assert parsed(Trained, "--the_method heun").shown.sampling.sampler == "heun"  # an earlier name


def test_steps_of_training_are_iterations():
    """Those of previews have another name than in sampling."""
    for command, ours in ((GeneratorRun, "iterations"), (ControlNetRun, "iterations"), (StageCRun, "updates")):
        assert message_of(parsed, command, "--steps 9").startswith(
            f"unknown flag or argument '--steps'; did you mean --{ours}?"
        )
    assert "did you mean --preview_steps" in message_of(parsed, GeneratorRun, "--num_inference_steps 9")
    assert message_of(from_text, GeneratorRun, "steps: 9").endswith("; did you mean iterations?")
    assert message_of(from_text, GeneratorRun, "preview: {steps: 9}").endswith("; it belongs under preview.sampler")
    assert parsed(GeneratorRun, "--preview_steps 9").preview.sampler.steps == 9
    message = message_of(parsed, GeneratorRun, "--preview_steps 9 --timestep_respacing 9")
    assert message.startswith("--preview_steps and --timestep_respacing exclude each other")
    message = message_of(parsed, GeneratorRun, "--preview_steps 1001")
    assert message == "--preview_steps is 1001, but must be at most 1000, the steps of the process"


def composed(**fields):
    return dataclasses.make_dataclass("Composed", [(name, kind, field) for name, (kind, field) in fields.items()])


def test_names_of_flags_are_unique():
    with pytest.raises(TypeError, match="two settings called lr"):
        by_name(composed(lr=(float, option(1.0, "x")), t=(Training, section(Training))))
    with pytest.raises(TypeError, match="two settings called lr"):
        by_name(composed(a=(Training, section(Training)), b=(Training, section(Training))))
    with pytest.raises(TypeError, match="two settings called x_lr"):
        by_name(composed(x_lr=(float, option(1.0, "x")), t=(Training, section(Training, prefix="x_"))))
    with pytest.raises(TypeError, match="a setting called width, which is an earlier name"):
        by_name(composed(width=(int, option(1, "x")), m=(Model, section(Model))))
    with pytest.raises(TypeError, match="two settings called use_ddim"):
        by_name(composed(use_ddim=(bool, option(False, "x"))))
    assert len(by_name(composed(a=(Training, section(Training)), b=(Training, section(Training, prefix="b_"))))) == 8


# -------------------------------------------------------------------------------------------------- lists of sections


def test_lists_of_sections_in_files():
    nested = from_text(Cascade, "decoder: {unets: [{dim: 3}, {}, {mults: [1, 2, 3]}]}")
    assert nested.decoder.unets == (UNet(3), UNet(), UNet(mults=(1, 2, 3)))
    assert from_text(Cascade, "unets: [{dim: 3}]").decoder.unets == (UNet(3),)
    assert from_text(Cascade, '{"decoder": {"unets": [{"dim": 3}]}}').decoder.unets == (UNet(3),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "decoder: {unets: [{}, {dmi: 3}]}",
            "decoder.unets[1].dmi (run.yaml, line 1) is an unknown setting; did you",
        ),
        ("decoder: {unets: [{}, {dim: x}]}", "decoder.unets[1].dim (run.yaml, line 1) is 'x', but must be an integer"),
        ("decoder: {unets: [{}, {dim: 0}]}", "decoder.unets[1].dim (run.yaml, line 1) is 0, but must be at least 1"),
        ("decoder: {unets: {dim: 1}}", "decoder.unets (run.yaml, line 1) is {'dim': 1}, but must be a list"),
        ("decoder: {unets: [3]}", "decoder.unets[0] (run.yaml, line 1) is 3, but must be a mapping of settings"),
        (
            "decoder: {unets: [{eta: 3}]}",
            "decoder.unets[0].eta (run.yaml, line 1) is an unknown setting; it",
        ),
        (
            "unets: []\ndecoder: {unets: []}",
            "unets (run.yaml, line 1) is given twice, the second time",
        ),
        (
            "decoder: {unets: [{dim: 1, start_dim: 1}]}",
            "decoder.unets[0].dim (run.yaml, line 1) is given twice, under its present and an earlier name",
        ),
    ],
)
def test_bad_lists_are_called_by_their_path(text, message):
    assert message_of(from_text, Cascade, text).startswith(message)


def test_set_addresses_items_of_files_and_of_defaults():
    text = "decoder: {unets: [{dim: 3}, {}]}"
    config = from_text(Cascade, text, "--set", "decoder.unets.0.dim=5", "--set", "decoder.unets[1].start_dim=6")
    assert config.decoder.unets == (UNet(5), UNet(6))
    config = parsed(Cascade, "--set decoder.unets.1.mults=1,4")
    assert config.decoder.unets == (UNet(), UNet(64, (1, 4)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--set decoder.unets.-1.dim=1", "give an index from 0 to 1"),
        ("--set decoder.unets.1=1", "--set decoder.unets.1 is a section"),
        ("--set decoder.unets.1.dim=0", "--set decoder.unets.1.dim is 0, but must be at least 1"),
        ("--set sampling.sampler=heum", "must be one of ddim, heun; did you mean heun?"),
        (
            "--set sampling.eta=1 --set sampling.eta=2",
            "sets sampling.eta to 1, but --set sampling.eta sets",
        ),
        ("--unets 1", "unknown flag"),
    ],
)
def test_bad_assignments_are_one_sentence(flags, message):
    assert message in message_of(parsed, Cascade, flags)


def test_set_of_an_empty_list():
    text = "decoder: {unets: []}"
    assert "decoder.unets is an empty list" in message_of(from_text, Cascade, text, "--set", "decoder.unets.0.dim=1")


def test_flag_and_set_may_agree_and_win_over_the_file():
    config = from_text(Cascade, "eta: 0.25", "--eta", "0.5", "--set", "sampling.eta=0.5")
    assert config.sampling.eta == 0.5


# -------------------------------------------------------------------------------------------------------------- kinds


@pytest.fixture
def presets(tmp_path, monkeypatch):
    """Two presets, one of each kind."""
    texts = {"big": "kind: generator\nlr: 5", "clip": "kind: classifier\ntraining: {lr: 7}"}
    monkeypatch.setattr(sources, "preset_names", lambda: sorted(texts))
    monkeypatch.setattr(sources, "preset_text", texts.__getitem__)
    sources.presets_of.cache_clear()
    yield
    sources.presets_of.cache_clear()


def test_presets_and_files_of_the_own_kind_or_none_are_accepted(presets):
    assert parsed(GeneratorLike, "--preset big").training.lr == 5
    assert from_text(GeneratorLike, "kind: generator\nlr: 3", "--preset", "big").training.lr == 3
    assert from_text(GeneratorLike, "lr: 3").training.lr == 3
    assert from_text(Run, "lr: 3").training.lr == 3


def test_another_kind_is_refused_with_the_right_script(presets):
    assert "run.yaml holds settings for training a generator: use it with scripts/train_generator.py" in message_of(
        from_text, ClassifierLike, "kind: generator"
    )
    assert "scripts/train_generator.py" in message_of(parsed, Run, "--preset big")
    assert "kind in run.yaml is ['generator'], but must be one of" in message_of(from_text, Run, "kind: [generator]")


def test_dry_run_prints_the_kind_first_and_is_read_back(presets, capsys):
    with pytest.raises(SystemExit) as leave:
        parsed(GeneratorLike, "--preset big --dry_run --flip")
    assert leave.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("kind: generator\nmodel:\n")
    assert from_text(GeneratorLike, text) == GeneratorLike(training=Training(lr=5, flip=True))
    assert "scripts/train_generator.py" in message_of(from_text, ClassifierLike, text)


def test_dry_run_without_a_kind(capsys):
    with pytest.raises(SystemExit):
        parsed(Cascade, "--dry_run --set decoder.unets.0.dim=5")
    text = capsys.readouterr().out
    assert "kind:" not in text
    assert from_text(Cascade, text).decoder.unets == (UNet(5), UNet(dim=64))


def test_a_command_of_several_kinds_takes_that_of_flag_preset_or_file(presets, tmp_path):
    (tmp_path / "file.yaml").write_text("kind: classifier\nlr: 3")
    (tmp_path / "plain.yaml").write_text("lr: 3")
    file, plain = (["--config", str(tmp_path / name)] for name in ("file.yaml", "plain.yaml"))
    for argv, expected, lr in (
        ([], GeneratorLike, 3e-4),
        (["--kind", "classifier"], ClassifierLike, 3e-4),
        (["--preset", "clip"], ClassifierLike, 7),
        (file, ClassifierLike, 3),
        (plain, GeneratorLike, 3),
        ([*plain, "--kind=classifier"], ClassifierLike, 3),
        ([*file, "--preset", "clip", "--kind", "classifier", "--lr", "4"], ClassifierLike, 4),
    ):
        config = parse_kind(KINDS, argv)
        assert type(config) is expected and config.training.lr == lr
    assert "--kind is 'clasifier'" in message_of(parse_kind, KINDS, ["--kind", "clasifier"])
    assert "--kind is given 2 times" in message_of(parse_kind, KINDS, ["--kind", "generator", "--kind", "generator"])
    assert "file.yaml holds settings for training a classifier" in message_of(
        parse_kind, KINDS, [*file, "--preset", "big"]
    )
    assert "unknown flag" in message_of(parse_kind, KINDS, ["--kind", "classifier", "--num_channels", "3"])
    assert "unknown flag" in message_of(parsed, GeneratorLike, "--kind generator")


# --------------------------------------------------------------------------------------------------------------- help


def test_a_section_has_its_earlier_names_in_files_and_paths():
    config = from_text(Cascade, "drawing: {sampler: heun}", "--set", "drawing.eta=0.5")
    assert config.sampling == Sampling("heun", 0.5)
    assert "is given twice" in message_of(from_text, Cascade, "drawing: {method: heun}\nsampling: {sampler: heun}")


def help_of(call, capsys, *arguments):
    with pytest.raises(SystemExit):
        call(*arguments, ["--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_names_every_flag_and_section(presets, capsys):
    text = help_of(parse, capsys, Run)
    assert all(f"--{name} " in text for name in [*by_name(Run), "set", "config", "dry_run"])
    assert all(f"--{old} " in text for old in ALIASES if ALIASES[old].field in by_name(Run))
    assert "--width" not in text  # an earlier name
    text = help_of(parse, capsys, Cascade)
    assert "Sampling: --sampler" in text and "Sampling (flags with upsampler_): --upsampler_sampler" in text
    assert "decoder.unets: U-Nets, by stage, each with dim, mults, cond_drop; in a config file, or --set" in text
    assert "--unets" not in text
    percent = composed(unets=(tuple[UNet, ...], option((), "2 % of them")), rate=(float, option(1.0, "or 3 %")))
    text = help_of(parse, capsys, percent)
    assert "2 % of them" in text and "or 3 %" in text


def test_presets_are_read_for_help_alone(monkeypatch):
    """Reading all of them takes as long as the rest of the command line."""
    monkeypatch.setattr(sources, "preset_text", lambda name: pytest.fail(f"{name} was read"))
    sources.presets_of.cache_clear()
    assert parse(GeneratorLike, []) == GeneratorLike()


def test_help_lists_the_presets_of_the_own_kind(presets, capsys):
    assert "named settings: big --config" in help_of(parse, capsys, GeneratorLike)
    assert "--preset" not in help_of(parse, capsys, Run)
    assert "generator, classifier; default" in help_of(parse_kind, capsys, KINDS)


def test_help_shows_what_people_set_and_help_all_the_rest(capsys):
    """Of many flags those that are common, but no checks of a checkpoint; of few all."""
    shown = {}
    for config, flag in itertools.product((SampleRun, DemoConfig), ("--help", "--help_all")):
        with pytest.raises(SystemExit):
            parse(config, [flag])
        shown[config, flag] = capsys.readouterr().out
    brief, full = ({*re.findall(r"^  --(\w+)", shown[SampleRun, f"--{name}"], re.M)} for name in ("help", "help_all"))
    assert {"model_path", "prompts", "steps", "help_all"} <= brief < full and len(brief) < 40
    assert (
        not {"eta", "image_size", "use_ddim"} & brief and {"eta", "image_size", "use_ddim", *by_name(SampleRun)} <= full
    )
    more = len(by_name(SampleRun)) - len(brief & by_name(SampleRun).keys())
    assert shown[SampleRun, "--help"].endswith(f"\n{more} more settings: --help_all\n")
    assert "more settings" not in shown[SampleRun, "--help_all"] + shown[DemoConfig, "--help"]
    assert {*by_name(DemoConfig)} <= {*re.findall(r"^  --(\w+)", shown[DemoConfig, "--help"], re.M)}
