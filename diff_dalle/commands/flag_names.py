"""What flags are called: a setting's own name, earlier ones, and names in Guided-Diffusion."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..config import KeyPath, Leaf, leaves, members, present_keys


@dataclass(frozen=True)
class Alias:
    """A flag of Guided-Diffusion that sets a field with another name here, or none.

    field:       "" = the flag has no effect here, for the reason that ``why`` is.
    true_value:  what a True flag sets, for a boolean alias (False returns the field to its default when it holds that
                 value); None passes the value on unchanged.
    false_value: the field that a False flag sets, and to what, where that is not the default.
    beside:      a setting that the command must have too.
    only:        the one value that the flag may have, which sets nothing.
    states:      the flag sets nothing, but says what the field must be: whether it is other than 0.
    """

    field: str
    true_value: str | None = None
    false_value: tuple[str, str] | None = None
    beside: str = ""
    only: str = ""
    states: bool = False
    why: str = ""

    @property
    def help(self) -> str:
        if self.why:
            return f"without effect: {self.why}"
        if self.only:
            return f"must be {self.only}"
        if self.states:
            return f"whether --{self.field} is above 0, which it must agree with"
        return f"same as --{self.field}" + (f" {self.true_value}" if self.true_value else "")

    @property
    def is_boolean(self) -> bool:
        return self.true_value is not None or self.states or bool(self.why)


ALIASES = {
    "use_fp16": Alias("precision", "fp16"),
    "predict_xstart": Alias("prediction", "x_start"),
    "use_kl": Alias("loss_type", "rescaled_kl"),
    "rescale_learned_sigmas": Alias("loss_type", "rescaled_mse"),
    "learn_sigma": Alias("variance", "learned_range"),
    "sigma_small": Alias("variance", "fixed_small"),
    "use_ddim": Alias("sampler", "ddim"),
    "classifier_use_fp16": Alias("classifier_precision", "fp16"),
    "large_size": Alias("image_size", beside="small_size"),
    "index_dir": Alias("data_dir"),
    "index_dir_val": Alias("val_data_dir"),
}
_OF_DENOISERS = Alias("", why="a classifier does not denoise, so that its process has no such setting")
#: Of the commands that train one kind of network, and of those that train none.
OWN_ALIASES = {
    "": {"clip_denoised": Alias("thresholding", "static", ("thresholding", "none"))},
    "generator": {
        "class_cond": Alias("num_classes", states=True),
        "use_new_attention_order": Alias(
            "", why="the weights of this library have one order; convert.py reads and writes both"
        ),
    },
    "classifier": {
        "classifier_use_fp16": Alias("precision", "fp16"),
        "classifier_pool": Alias("", only="attention"),
        "anneal_lr": Alias("lr_anneal", "linear", ("lr_anneal_steps", "0")),
        **dict.fromkeys(("learn_sigma", "use_kl", "predict_xstart", "rescale_learned_sigmas"), _OF_DENOISERS),
    },
}


@functools.cache
def by_name(config_class) -> dict[str, Leaf]:
    """Settings by the names of their flags; without those of sections that have no flags.

    Raises TypeError when two have the same name: flags are flat, so a section that a command has twice needs a prefix.
    """
    table: dict[str, Leaf] = {}
    for leaf in leaves(config_class):
        if leaf.in_file:
            continue
        if leaf.name in table or leaf.name in ALIASES:
            raise TypeError(f"{config_class.__name__} has two settings called {leaf.name}")
        table[leaf.name] = leaf
    for old in [old for leaf in table.values() for old in leaf.earlier_names]:
        if old in table or old in ALIASES:
            raise TypeError(f"{config_class.__name__} has a setting called {old}, which is an earlier name of another")
    return table


def find_leaf(config_class, path: KeyPath) -> Leaf | None:
    """The setting at a path, or else with the name or key that is its end."""
    table = by_name(config_class)
    called = next((leaf for leaf in table.values() if leaf.called and leaf.path[-1] == path[-1]), None)
    return next((leaf for leaf in table.values() if leaf.path == path), table.get(str(path[-1]), called))


@functools.cache
def present_names(config_class) -> dict[str, str]:
    """Present names of flags by their earlier ones."""
    return {old: leaf.name for leaf in by_name(config_class).values() for old in leaf.earlier_names}


def leaf_called(config_class, name: str) -> Leaf | None:
    """The setting that a key or flag means: one of the class itself, or by the name of its flag, maybe an earlier
    one."""
    member = members(config_class).get(present_keys(config_class).get(name, name))
    if isinstance(member, Leaf):
        return member
    return by_name(config_class).get(present_names(config_class).get(name, name))


@functools.cache
def aliases_of(config_class) -> dict[str, Alias]:
    """The aliases whose field the config class has."""
    table = by_name(config_class)
    found = ALIASES | OWN_ALIASES.get(getattr(config_class, "kind", ""), {})
    return {
        name: alias
        for name, alias in found.items()
        if {alias.field, alias.beside} - {""} <= table.keys() and name not in table
    }
