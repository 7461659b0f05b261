"""Dataclasses as the one source of flags, YAML keys, help texts and the config inside a checkpoint.

A component declares its settings once, beside the class they configure::

    @settings
    class OptimConfig:
        '''Optimizer'''
        lr: float = option(3e-4, "peak learning rate", above=0)

A command composes such sections into one dataclass, from which ``commands.command_line.parse`` makes its flags::

    @settings
    class DecoderRun:
        optim: OptimConfig = section(OptimConfig)                                   # optim: {lr: …}   --lr
        prior_optim: OptimConfig = section(OptimConfig, prefix="prior_")            # prior_optim: {lr: …}   --prior_lr
        unets: tuple[UNetConfig, ...] = option((UNetConfig(),), "U-Nets, by stage")  # unets: [{dim: …}, {dim: …}]

``errors`` holds what is wrong as data, ``declaration`` declares settings and lists them, ``values`` checks single
values, ``reading`` makes instances of nested dicts and files, ``dicts`` makes dicts of instances and compares them,
``yaml_text`` reads YAML and JSON, ``expectations`` compares flags with checkpoints. Reading is strict: unknown keys,
keys given twice and values of the wrong type are an InputError, which names everything that is wrong.
"""

from .declaration import (
    Leaf,
    Section,
    faults_of,
    leaves,
    members,
    option,
    present_keys,
    refusal,
    section,
    settings,
    title_of,
)
from .dicts import Change, differences, dump, entries, redacted, setting_changes, to_dict
from .errors import (
    ABSENT,
    HIDDEN,
    MARK,
    MAX_FAULTS,
    Fault,
    InputError,
    KeyPath,
    Spelling,
    as_flag,
    cut,
    named,
    path_of,
    quantity,
    quoted,
    redact,
    spelled,
    spelled_path,
)
from .expectations import add_optional, disagreements, expectations, given, overrides, values_by_name
from .names import lookup, nearest
from .reading import from_dict, present_form
from .registry import Registry, installed, loaded
from .values import FlagText, checked, shown, type_name
from .yaml_text import MAX_TEXT, load_located, load_mapping, load_texts
