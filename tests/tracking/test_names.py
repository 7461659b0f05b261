"""Names with placeholders."""

import pytest
from refusing import refused

from diff_dalle.config import InputError
from diff_dalle.tracking.saver import check_name, check_relative, fill_name

VALUES = {"epoch": 3, "step": 200, "sample": 17, "samples_seen": 6417, "unet": "0-1", "val_loss": 0.123456}


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("latest.pth", "latest.pth"),
        ("e{epoch}/s{step}_{sample}_{samples_seen}.pth", "e3/s200_17_6417.pth"),
        ("unet{unet}_{step:06d}.pth", "unet0-1_000200.pth"),
        ("{step:4}|{step:04}", " 200|0200"),
        ("best_{val_loss}.pth", "best_0.1235.pth"),
        ("best_{val_loss:.2f}.pth", "best_0.12.pth"),
        ("{{step}}{step}", "{step}200"),
    ],
)
def test_placeholders_are_filled(name, filled):
    check_name(name, "save_best_to", relative=False)
    assert fill_name(name, VALUES) == filled


def test_a_loss_that_is_not_known_is_none():
    assert fill_name("{val_loss}_{val_loss:.3f}.pth", {**VALUES, "val_loss": None}) == "none_none.pth"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{stp}.pth", r"save_best_to has \{stp\}, but the placeholders are \{epoch\}, .*; did you mean step\?"),
        ("{step.real}.pth", "placeholders"),
        ("{step.__class__.__mro__}.pth", "placeholders"),
        ("{step[0]}.pth", "placeholders"),
        ("{0}.pth", "placeholders"),
        ("{}.pth", "placeholders"),
        ("{step!r}.pth", "leave !r out"),
        ("{step:>9}.pth", r"like that of \{step:06d\}"),
        ("{step:999999999}.pth", "a format must be"),
        ("{step:.2f}.pth", "a format must be"),
        ("{step:{epoch}}.pth", "a format must be"),
        ("{unet:02d}.pth", "a format must be"),
        ("{val_loss:06d}.pth", r"like that of \{val_loss:.4f\}"),
        ("{step.pth", "does not end"),
        ("step}.pth", "does not end"),
        ("", "must be the path of a file"),
        (" ", "must be the path of a file"),
        ("folder/", "must be the path of a file"),
        ("a\nb.pth", "must be the path of a file"),
    ],
)
def test_others_are_refused(name, words):
    with pytest.raises(InputError, match=words) as error:
        check_name(name, "save_best_to", relative=False)
    assert "save_best_to" in str(error.value)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../x", "a//x", "./x", "a\\x", "C:x", "s3://b/x", ""])
def test_names_in_a_repository_stay_inside(path):
    with refused("must be relative"):
        check_relative(path, "save_meta_to")
    check_relative("a/b.c/x.pth", "save_meta_to")


def test_absolute_paths_are_for_local_savers():
    check_name("/runs/x.pth", "save_latest_to", relative=False)
    with refused("must be relative"):
        check_name("/runs/x.pth", "save_latest_to", relative=True)
