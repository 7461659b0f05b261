"""Dataclasses as the one source of flags, YAML keys, help texts and the config inside a checkpoint.

A component declares its settings once, beside the class they configure::

    @dataclass(frozen=True)
    class OptimConfig:
        '''Optimizer'''
        lr: float = option(3e-4, "peak learning rate")

A command composes such sections into one dataclass, from which ``commands.command_line.parse`` makes its flags::

    @dataclass(frozen=True)
    class DecoderRun:
        optim: OptimConfig = section(OptimConfig)                                   # optim: {lr: …}   --lr
        prior_optim: OptimConfig = section(OptimConfig, prefix="prior_")            # prior_optim: {lr: …}   --prior_lr
        unets: tuple[UNetConfig, ...] = option((UNetConfig(),), "U-Nets, by stage")  # unets: [{dim: …}, {dim: …}]

``declaration`` has these functions and lists what is declared, ``values`` checks single values, ``dicts`` converts
between instances and nested dicts, ``yaml_text`` reads YAML and JSON, ``expectations`` compares flags with checkpoints.
Reading is strict: an unknown key, a key given twice or a value of the wrong type is an InputError.
"""

from .declaration import Leaf, Section, leaves, members, option, present_keys, section, type_hints
from .dicts import differences, dump, entries, from_dict, redacted, to_dict
from .expectations import disagreements, expectations
from .names import lookup, nearest
from .values import checked, checked_list, cut, quoted, shown, type_name
from .yaml_text import MAX_TEXT, load_mapping

__all__ = [
    "MAX_TEXT",
    "Leaf",
    "Section",
    "checked",
    "checked_list",
    "cut",
    "differences",
    "disagreements",
    "dump",
    "entries",
    "expectations",
    "from_dict",
    "leaves",
    "load_mapping",
    "lookup",
    "members",
    "nearest",
    "option",
    "present_keys",
    "quoted",
    "redacted",
    "section",
    "shown",
    "to_dict",
    "type_hints",
    "type_name",
]
