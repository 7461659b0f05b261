"""What a checkpoint's config says about its network."""

from dataclasses import dataclass

from config_making import Model, Training

from diff_dalle.checkpoints.kinds import Kind
from diff_dalle.config import section


@dataclass(frozen=True)
class Settings:
    model: Model = section(Model, was=("network",))
    training: Training = section(Training)


def test_a_config_may_be_older_than_a_name_or_a_section():
    kind = Kind("toy", Settings, *[lambda *_: None] * 3)
    assert kind.read_settings({"network": {"width": 7}, "other": 1}) == Settings(Model(num_channels=7))
