"""Tiny checkpoints that several tests of cascades share."""

import pytest
from cascade_making import make_stages
from checkpoint_making import make_classifier_file
from latent_file_making import make_cascade

from diff_dalle.sampling.pipeline import Pipeline, load


@pytest.fixture(scope="session")
def stage_files(tmp_path_factory):
    """Paths of generators by kind, and of classifiers."""
    folder = tmp_path_factory.mktemp("cascade")
    paths = make_stages(folder)
    for name, settings in {"16": {}, "32": {"image_size": 32}, "clean": {"noised": False}}.items():
        (folder / name).mkdir()
        paths[f"classifier {name}"] = make_classifier_file(folder / name, **settings)
    return paths


@pytest.fixture(scope="session")
def latent(tmp_path_factory):
    """Paths of the networks of a latent cascade."""
    return make_cascade(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="session")
def cascade(stage_files):
    """8 → 16 → 32 pixels; only the upsampler in the middle has no text encoder."""
    paths = [stage_files["middle"], stage_files["top"]]
    return load(stage_files["base"], "cpu", upsampler_paths=paths, keep_loaded=True)


@pytest.fixture(scope="session")
def upsamplers_only(cascade):
    return Pipeline(cascade.stages[1:])
