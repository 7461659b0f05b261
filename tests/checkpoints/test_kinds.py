"""What a checkpoint's config says about its network, and what a kind must have."""

import pytest
from config_making import Model, Training

from diff_dalle.checkpoints.kind import NetworkKind
from diff_dalle.checkpoints.kinds import KINDS, find_kind
from diff_dalle.config import section, settings, to_dict


@settings
class Toy(NetworkKind):
    name = "toy"
    title = "a toy"
    does = "text-to-image"

    model: Model = section(Model, was=("network",))
    training: Training = section(Training)

    network = object
    forward = signal = None


def test_a_config_may_be_older_than_a_name_or_a_section():
    assert Toy.read({"network": {"width": 7}, "other": 1}) == Toy(Model(num_channels=7))


def test_a_kind_that_forgets_something_cannot_be_declared():
    with pytest.raises(TypeError, match="the kind half lacks title, network, forward, signal"):

        class Half(NetworkKind):
            name = "half"
            does = "text-to-image"


def test_every_kind_is_where_the_table_says():
    assert all(find_kind(name).name == name for name in KINDS)


@pytest.mark.parametrize("kind", ["stage_b", "stage_c"])
def test_a_latent_stage_of_an_earlier_version_does_not_rescale_its_guidance(kind):
    now = to_dict(find_kind(kind)())
    earlier = {
        **now,
        "sampling": {name: now["sampling"][name] for name in now["sampling"] if name != "guidance_rescale"},
    }
    found = [find_kind(kind).read(config).sampling.guidance_rescale for config in (now, earlier)]
    assert found == [0.7, 0.0]
