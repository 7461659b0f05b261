"""No number, list or text of a setting is too large to be looked at, in any config class of the library."""

import faulthandler
import importlib
import inspect
import pkgutil
import typing

import pytest

import diff_dalle
from diff_dalle.config import Fault, InputError, option, settings
from diff_dalle.config.bounds import MAX_NUMBER, MAX_SEED, MAX_TEXTS, MAX_VALUES
from diff_dalle.config.declaration import Leaf, check_declared, members
from diff_dalle.recipes.cascade.stages import StageCRun


def config_classes() -> list[type]:
    modules = [each.name for each in pkgutil.walk_packages(diff_dalle.__path__, "diff_dalle.")]
    found = {}
    for name in modules:
        if not name.endswith("__main__"):
            for each in vars(importlib.import_module(name)).values():
                if inspect.isclass(each) and getattr(each, "__post_init__", None) is check_declared:
                    found[f"{each.__module__}.{each.__qualname__}"] = each
    return list(found.values())


def settings_with(*kinds: type) -> list[tuple[type, Leaf]]:
    pairs = [(each, leaf) for each in config_classes() for leaf in members(each).values() if isinstance(leaf, Leaf)]
    return [(each, leaf) for each, leaf in pairs if not (leaf.item or leaf.optional) and kind_of(leaf) in kinds]


def kind_of(leaf: Leaf) -> type:
    """The type of the values, within lists and optional ones."""
    kind = leaf.type
    while args := [each for each in typing.get_args(kind) if each not in (type(None), ...)]:
        kind = args[0]
    return kind


def as_value(leaf: Leaf, value):
    kind = leaf.type
    while typing.get_origin(kind) is tuple:
        kind, value = typing.get_args(kind)[0], (value,)
    return value


def rules_of(leaf: Leaf, value) -> list[str]:
    return [fault.rule for fault in leaf.faults(value)]


@pytest.mark.parametrize("value", [2**40, 2**62, -(2**62), float(2**60)])
def test_absurd_numbers_are_refused_in_every_config_class(value):
    found = settings_with(int, float)
    assert len(found) > 500
    accepted = {leaf.path[-1] for _, leaf in found if not rules_of(leaf, as_value(leaf, value))}
    assert not [name for name in accepted if value < 0 or not name.endswith("seed")]


def test_seeds_are_as_large_as_torch_takes():
    seeds = [leaf for _, leaf in settings_with(int) if leaf.path[-1] == "seed"]
    assert len(seeds) > 5 and not any(rules_of(leaf, as_value(leaf, MAX_SEED)) for leaf in seeds)
    assert all(rules_of(leaf, as_value(leaf, MAX_SEED + 1)) for leaf in seeds)


def test_joint_rules_take_absurd_numbers():
    """What is wrong with several settings is found without work that grows with their values."""
    faulthandler.dump_traceback_later(120, exit=True)  # 2 ** 2 ** 63 holds the interpreter: only this ends it
    try:
        for config_class in config_classes():
            for leaf in members(config_class).values():
                if isinstance(leaf, Leaf) and kind_of(leaf) is int and not (leaf.item or leaf.optional):
                    with pytest.raises(InputError):
                        config_class(**{leaf.path[-1]: as_value(leaf, 2**63)})
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    ("text", "rule"), [("a\0b", "must not hold a NUL character"), ("a\ud800", "must be text that UTF-8 can hold")]
)
def test_texts_that_no_file_can_hold_are_refused(text, rule):
    found = [(each, leaf) for each, leaf in settings_with(str) if not leaf.choices]
    assert len(found) > 150
    for config_class, leaf in found:
        assert rule in rules_of(leaf, as_value(leaf, text))[0], (config_class, leaf.path)


@settings
class Lists:
    """Lists"""

    numbers: tuple[int, ...] = option((), "numbers")
    pairs: tuple[tuple[float, ...], ...] = option((), "numbers", above=0)
    texts: tuple[str, ...] = option((), "texts")
    few: tuple[str, ...] = option((), "texts", longest=2)


@pytest.mark.parametrize(
    ("name", "longest", "value"), [("numbers", MAX_VALUES, 1), ("texts", MAX_TEXTS, "a"), ("few", 2, "a")]
)
def test_lists_have_a_limit(name, longest, value):
    assert Lists(**{name: (value,) * longest})
    with pytest.raises(InputError, match=f"{name} is .*, but must have at most {longest:,} values"):
        Lists(**{name: (value,) * (longest + 1)})


def test_what_is_in_lists_of_lists_is_looked_at():
    with pytest.raises(InputError, match="pairs is 1,0, but must be above 0"):
        Lists(pairs=((1.0, 0.0),))


def test_a_number_without_a_declared_limit_has_one():
    assert Lists(numbers=(int(MAX_NUMBER),))
    with pytest.raises(InputError, match=r"numbers is -1000000000001, but must be at most 1,000,000,000,000 in size"):
        Lists(numbers=(-int(MAX_NUMBER) - 1,))


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\\b", "..", "."])
def test_an_experiment_is_one_folder(name):
    with pytest.raises(InputError) as error:
        StageCRun(experiment_id=name)
    assert Fault("experiment_id", "must be the name of one folder", name) in error.value.faults
