"""Shards with embeddings, and a folder for what savers keep, of all tests here."""

import pytest
from decoder_file_making import make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("shards"))


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Savers keep their files there, under the same name in every run: names are part of a checkpoint's settings."""
    monkeypatch.chdir(tmp_path)
