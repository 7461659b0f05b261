"""What flags are called: a setting's own name, earlier ones, and names in Guided-Diffusion."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..config import Leaf, leaves


@dataclass(frozen=True)
class Alias:
    """A flag of Guided-Diffusion that sets a field with another name here.

    true_value: what a True flag sets, for a boolean alias (False returns the field to its default when it holds that
                value); None passes the value on unchanged.
    """

    field: str
    true_value: str | None = None


ALIASES = {
    "use_fp16": Alias("precision", "fp16"),
    "predict_xstart": Alias("prediction", "x_start"),
    "use_kl": Alias("loss_type", "rescaled_kl"),
    "rescale_learned_sigmas": Alias("loss_type", "rescaled_mse"),
    "learn_sigma": Alias("variance", "learned_range"),
    "sigma_small": Alias("variance", "fixed_small"),
    "use_ddim": Alias("sampler", "ddim"),
    "index_dir": Alias("data_dir"),
    "index_dir_val": Alias("val_data_dir"),
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


@functools.cache
def present_names(config_class) -> dict[str, str]:
    """Present names of flags by their earlier ones."""
    return {old: leaf.name for leaf in by_name(config_class).values() for old in leaf.earlier_names}


@functools.cache
def aliases_of(config_class) -> dict[str, Alias]:
    """The aliases whose field the config class has."""
    return {name: alias for name, alias in ALIASES.items() if alias.field in by_name(config_class)}
