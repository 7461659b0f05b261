"""What ``help()`` says about a config class."""

import pydoc

from config_making import Cascade, Sampling, Training

import diff_dalle
from diff_dalle.config import leaves, option, settings, title_of

KINDS = {"round": 1}


@settings
class Shape:
    """Shape

    More about shapes.
    """

    kind: str = option("round", "what it looks like", choices=KINDS)
    size: float = option(2.0, "its size in pixels", above=0)


def test_help_lists_the_settings_with_type_default_and_help():
    text = pydoc.render_doc(Shape, renderer=pydoc.plaintext)
    assert " |  Shape\n |  \n |  More about shapes.\n |  \n |  Settings:\n |      kind: str = 'round'\n" in text
    assert " |      size: float = 2.0\n |          its size in pixels; must be above 0\n" in text
    assert "limit: int | None = None" in Training.__doc__ and "data_dir: tuple[str, ...] = ()" in Training.__doc__


def test_choices_are_those_at_the_time_of_asking(monkeypatch):
    assert "what it looks like; one of round\n" in Shape.__doc__
    monkeypatch.setitem(KINDS, "square", 2)
    assert "what it looks like; one of round, square\n" in Shape.__doc__


def test_a_section_is_told_by_its_class_and_title():
    assert "    upsampling: Sampling\n        Sampling" in Cascade.__doc__
    assert Shape(size=1.0).__doc__ == Shape.__doc__ and title_of(Shape) == "Shape"
    assert "eta: float = 0.0" not in Cascade.__doc__ and "eta: float = 0.0" in Sampling.__doc__


def test_help_of_the_public_config_classes_has_the_help_of_each_setting():
    classes = [getattr(diff_dalle, name) for name in diff_dalle.__all__ if name.endswith("Config")]
    assert len(classes) > 5
    for config_class in classes:
        text = " ".join(config_class.__doc__.split())
        for leaf in leaves(config_class):
            if len(leaf.path) == 1:
                assert f"{leaf.path[0]}: " in text and " ".join(leaf.help.split()) in text
