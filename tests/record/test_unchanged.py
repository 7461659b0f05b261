"""What must not change is as it was: see take.py, whose ``--update`` accepts what has changed."""

import pytest
from take import RECORDINGS, differences, forgotten
from workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("record"))


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_is_found_is_what_was_recorded(workspace, name):
    assert not (text := differences(name, workspace)), f"\n{text}"


def test_everything_recorded_is_still_made():
    assert not forgotten()
