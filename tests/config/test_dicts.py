import dataclasses

import pytest
from config_making import Cascade, Decoder, Model, Run, Sampling, Training, UNet, from_text

from diff_dalle.config import (
    FlagText,
    InputError,
    checked,
    differences,
    dump,
    entries,
    from_dict,
    leaves,
    option,
    redacted,
    to_dict,
)

FULL = Cascade(
    Decoder((UNet(8), UNet(16, (1, 3)), UNet(32)), 50),
    Sampling("heun"),
    Sampling(eta=0.5),
)


@pytest.mark.parametrize("config", [Run(), Run(Model(3, (0.5,)), Training(1.0, ("a", "b"), 3, True)), Cascade(), FULL])
def test_dicts_and_yaml_round_trip(config):
    assert from_dict(type(config), to_dict(config)) == config
    assert from_text(type(config), dump(config)) == config


def test_lists_of_sections_are_lists_of_mappings():
    assert to_dict(FULL)["decoder"]["unets"][1] == {"dim": 16, "mults": [1, 3], "cond_drop": 0.5}
    assert from_dict(Cascade, {"decoder": {"unets": [{}, {"dim": 5}]}}).decoder.unets == (UNet(), UNet(5))
    assert from_dict(Cascade, {"decoder": {"unets": []}}).decoder.unets == ()


def test_keys_in_sections_have_no_prefix():
    assert to_dict(FULL)["upsampling"] == {"sampler": "ddim", "eta": 0.5}
    assert [leaf.name for leaf in leaves(Cascade)] == [
        "unets", "timesteps", "sampler", "eta", "upsampler_sampler", "upsampler_eta",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"modle": {}}, "modle is an unknown setting; did you mean model?"),
        ({"model": {"num_chanels": 3}}, "model.num_chanels is an unknown setting; did you mean num_channels?"),
        ({"model": 3}, "model is 3, but must be a mapping of settings"),
        ({"model": {"num_channels": 1.5}}, "model.num_channels is 1.5, but must be an integer"),
        ({"training": {"limit": "x"}}, "training.limit is 'x', but must be an integer or none"),
        ({"training": {"lr": "x" * 200}}, f"training.lr is '{'x' * 119}…, but must be a number"),
        ({"training": {"lr": 10**400}}, f"training.lr is 1{'0' * 119}…, but must be a number"),
        ({"training": {"lr": float("inf")}}, "training.lr is inf, but must be a finite number"),
        ({"training": {"lr": float("nan")}}, "training.lr is nan, but must be a finite number"),
        ({"model": {"channel_mult": [1, float("-inf")]}}, "must be a finite number"),
        ({"model": {"num_channels": 2**63}}, "is 9223372036854775808, but must be an integer between -(2^63 - 1) and"),
        ({"training": {"limit": -(2**63)}}, "must be an integer between -(2^63 - 1) and 2^63 - 1"),
        ({"model": {"variance": "fixed_smal"}}, "did you mean fixed_small?"),
    ],
)
def test_bad_mappings_are_one_sentence_with_the_path(mapping, message):
    with pytest.raises(InputError) as error:
        from_dict(Run, mapping)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"decoder": {"unets": [{}, {"dmi": 3}]}}, "decoder.unets[1].dmi is an unknown setting; did you mean dim?"),
        ({"decoder": {"unets": [{"dim": "x"}]}}, "decoder.unets[0].dim is 'x', but must be an integer"),
        ({"decoder": {"unets": {"dim": 3}}}, "decoder.unets is {'dim': 3}, but must be a list of sections"),
        ({"decoder": {"unets": [3]}}, "decoder.unets[0] is 3, but must be a mapping of settings"),
        ({"decoder": {"unets": [{}, {"dim": 0}]}}, "decoder.unets[1].dim is 0, but must be at least 1"),
        ({"sampling": {"eta": -1}}, "sampling.eta is -1, but must be at least 0"),
        ({"upsampling": {"eta": -1}}, "upsampling.eta is -1, but must be at least 0"),
        ({"upsampling": {"upsampler_eta": 1}}, "upsampling.upsampler_eta is an unknown setting"),
    ],
)
def test_bad_lists_and_prefixed_sections_are_called_by_their_path(mapping, message):
    with pytest.raises(InputError) as error:
        from_dict(Cascade, mapping)
    assert str(error.value).startswith(message)


def test_earlier_names_in_checkpoints():
    assert from_dict(Run, {"model": {"width": 7}}).model.num_channels == 7
    old = {"decoder": {"unets": [{"start_dim": 7}]}, "upsampling": {"method": "heun"}}
    config = from_dict(Cascade, old)
    assert config.decoder.unets == (UNet(7),) and config.upsampling.sampler == "heun"
    assert differences(old, to_dict(config), Cascade) == []
    assert from_dict(Cascade, {"drawing": {"method": "heun"}}).sampling.sampler == "heun"
    assert differences({"drawing": {"method": "heun"}}, to_dict(Cascade()), Cascade) == ['sampler ("heun" → "ddim")']
    with pytest.raises(InputError, match="drawing is given twice, under its present and an earlier name"):
        from_dict(Cascade, {"sampling": {}, "drawing": {}})
    with pytest.raises(InputError, match=r"model\.width is given twice, under its present and an earlier name"):
        from_dict(Run, {"model": {"num_channels": 7, "width": 7}})


@pytest.mark.parametrize("saved", [{"model": 3}, {"model": "num_channels"}, {"model": None}, {"model": [1]}])
def test_a_saved_config_of_another_structure_is_one_sentence(saved):
    with pytest.raises(InputError, match=r"model\.num_channels lies in .*, but must lie in a mapping of settings"):
        differences(saved, to_dict(Run()), Run)


@pytest.mark.parametrize("unets", [3, "x", {"a": 1}, [3]])
def test_a_saved_list_of_sections_of_another_structure_is_one_sentence(unets):
    with pytest.raises(InputError, match="unets is .*must be a list of sections|must lie in a mapping of settings"):
        differences({"decoder": {"unets": unets}}, to_dict(Cascade()), Cascade)


def test_long_differences_are_cut():
    (text,) = differences({"model": {"variance": "x" * 10**5}}, to_dict(Run()), Run)
    assert len(text) < 200


def test_secrets_are_not_recorded():
    command = "pipe:curl -H 'Authorization: Bearer abc.def' https://host/a.tar?sig=xyz"
    found = redacted({"data": {"data_dir": [command, "plain"], "n": 3, "none": None}})
    assert "abc.def" not in str(found) and "xyz" not in str(found) and "curl" in str(found)
    assert found["data"]["data_dir"][1] == "plain" and found["data"]["n"] == 3 and redacted(found) == found


def test_differences_leave_out_free_settings():
    changed = Run(training=Training(lr=1e-3, data_dir=("elsewhere",)))
    assert differences(to_dict(Run()), to_dict(changed), Run) == ["lr (0.0003 → 0.001)"]


def test_settings_that_a_config_is_too_old_for_have_their_default():
    old = to_dict(Run(Model(num_channels=7)))
    del old["training"], old["model"]["variance"]
    assert differences(old, to_dict(Run()), Run) == ["num_channels (7 → 128)"]
    assert differences({}, to_dict(Cascade()), Cascade) == []


def test_differences_in_lists_have_the_path_in_their_name():
    other = Cascade(Decoder((UNet(8), UNet(16, cond_drop=0.1))), Sampling("heun"), Sampling("heun"))
    assert differences(to_dict(FULL), to_dict(other), Cascade) == [
        "number of decoder.unets (3 → 2)",
        "decoder.unets[1].mults ([1, 3] → [1, 2])",
        "timesteps (50 → 1000)",
        'upsampler_sampler ("ddim" → "heun")',
        "upsampler_eta (0.5 → 0.0)",
    ]


def test_entries_list_every_setting():
    found = {name: value for name, _, value in entries(Cascade, to_dict(FULL))}
    assert found["number of decoder.unets"] == 3 and found["decoder.unets[2].dim"] == 32
    assert found["sampler"] == "heun" and found["upsampler_sampler"] == "ddim"
    assert len(found) == 1 + 3 * 3 + 1 + 2 + 2


@dataclasses.dataclass(frozen=True)
class Sources:
    data_dir: tuple[str, ...] = option((), "sources")


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("a,b/{0,1}.tar,,c", ["a", "b/{0,1}.tar", "c"]),
        ("pipe:cat {a,b}, c | tr , '{'", ["pipe:cat {a,b}, c | tr , '{'"]),
        ("a,pipe:cat b,c,pipe:cat d,e", ["a", "pipe:cat b,c", "pipe:cat d,e"]),
        ("expand:pipe:cat {0,1}.tar,x,expand:pipe:y", ["expand:pipe:cat {0,1}.tar,x", "expand:pipe:y"]),
        ("none", []),
    ],
)
def test_commands_are_taken_whole(text, sources):
    """From the command line, a file, and the settings in a checkpoint."""
    (leaf,) = leaves(Sources)
    for given in (text, sources):
        assert from_dict(Sources, {"data_dir": given}).data_dir == tuple(sources)
    assert checked(leaf, FlagText(text), "data_dir") == tuple(sources)
    config = Sources(tuple(sources))
    assert from_text(Sources, dump(config)) == config == from_dict(Sources, to_dict(config))
