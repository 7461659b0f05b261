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

``declaration`` has these functions and lists what is declared, ``values`` checks single values, ``reading`` makes
instances of nested dicts and files, ``dicts`` makes dicts of instances and compares them, ``yaml_text`` reads YAML and
JSON, ``expectations`` compares flags with checkpoints. Reading is strict: an unknown key, a key given twice or a value
of the wrong type is an InputError. That of a whole file names everything that is wrong, each with its path and line.
"""

from .declaration import Leaf, Section, leaves, members, option, present_keys, refusal, section, type_hints
from .dicts import differences, dump, entries, redacted, to_dict
from .expectations import disagreements, expectations, given, overrides
from .names import lookup, nearest
from .reading import KeyPath, Problems, from_dict, from_file, from_value, spelled_path
from .values import checked, checked_list, checked_mapping, cut, quoted, shown, type_name
from .yaml_text import MAX_TEXT, load_located, load_mapping, load_texts

__all__ = [
    "MAX_TEXT",
    "KeyPath",
    "Leaf",
    "Problems",
    "Section",
    "checked",
    "checked_list",
    "checked_mapping",
    "cut",
    "differences",
    "disagreements",
    "dump",
    "entries",
    "expectations",
    "from_dict",
    "from_file",
    "from_value",
    "given",
    "leaves",
    "load_located",
    "load_mapping",
    "load_texts",
    "lookup",
    "members",
    "nearest",
    "option",
    "overrides",
    "present_keys",
    "quoted",
    "redacted",
    "refusal",
    "section",
    "shown",
    "spelled_path",
    "to_dict",
    "type_hints",
    "type_name",
]
