import pytest
from config_making import Cascade, Run

from diff_dalle.commands.command_line import parse
from diff_dalle.config import InputError, disagreements, expectations, leaves


def test_expectations_name_what_disagrees():
    expected = expectations(Run, "Checks", leave_out=("flip",))
    flags = parse(expected, ["--num_channels", "64", "--lr", "0.5"])
    assert flags.data_dir is None
    config = parse(Run, ["--lr", "0.5"])
    assert disagreements(flags, config) == ["num_channels (64 given, 128 in the checkpoint)"]
    with pytest.raises(InputError, match="--flip"):
        parse(expected, ["--flip"])


def test_earlier_names_and_prefixes_are_accepted_and_lists_have_no_flag():
    flags = parse(expectations(Run, "Checks"), ["--width", "64", "--flip"])
    assert disagreements(flags, Run()) == [
        "num_channels (64 given, 128 in the checkpoint)", "flip (True given, False in the checkpoint)",
    ]  # fmt: skip
    expected = expectations(Cascade, "Checks")
    assert "unets" not in {leaf.name for leaf in leaves(expected)}
    flags = parse(expected, ["--upsampler_method", "heun", "--eta", "0"])
    assert disagreements(flags, Cascade()) == ["upsampler_sampler (heun given, ddim in the checkpoint)"]
