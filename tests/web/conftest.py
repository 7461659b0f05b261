"""Tiny models that several tests of the server share, and where a service answers."""

import pytest
from cascade_making import make_stages
from checkpoint_making import make_classifier_file, make_file
from control_making import make_controlnet
from lora_making import make_lora
from web_making import serving


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Paths: a generator, what goes with it, and the stages of a cascade."""
    folder = tmp_path_factory.mktemp("models")
    base, stages = make_file(folder), make_stages(folder)
    return {
        "base": base,
        "classifier": make_classifier_file(folder),
        "controlnet": make_controlnet(base, folder / "edges.pt"),
        "loras": tuple(make_lora(folder / f"{name}.safetensors", base) for name in ("red", "soft")),
        "low": stages["base"],
        "middle": stages["middle"],
    }


@pytest.fixture(scope="module")
def address(service):
    """Where the file's ``service`` answers."""
    with serving(service) as found:
        yield found
