"""Shards, and frozen networks that are trained on them, of all tests here."""

import pytest
from cascade_file_making import make_frozen, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def frozen(tmp_path_factory, world):
    return make_frozen(tmp_path_factory.mktemp("frozen"), world)
