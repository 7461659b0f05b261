"""The command line of every script, made from its config class.

Settings come from defaults, then ``--preset NAME``, then ``--config FILE``, then flags and ``--set``. Anything unknown,
given twice or of the wrong type stops with an InputError that names the nearest valid spelling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..checkpoints.kinds import TRAINING_COMMANDS
from ..config import (
    FlagText,
    InputError,
    Leaf,
    Section,
    checked,
    dump,
    leaves,
    members,
    nearest,
    shown,
    title_of,
    type_name,
)
from ..config.expectations import MUST_EQUAL
from .completion import complete, is_asked, suggest
from .examples import usage
from .flag_names import aliases_of, by_name, present_names
from .settings import Settings
from .sources import IMPORT_HELP, import_parts, presets_of, sources_on, values_on

DRY_RUN = Leaf(("dry_run",), bool, False, "print the resolved settings as YAML and exit")
GENERAL = ("preset", "config", "set", "import", "dry_run")  # flags of every command
HELPS = ("-h", "--help", "--help_all")
MOST = 40  # flags of a command, above which --help shows only those that people set
_COMMON = """
model_path data_dir val_data_dir caption_field random_flip logdir init_checkpoint
webdataset_path experiment_id checkpoint_path output_path generator_checkpoint_path effnet_checkpoint_path
stage_a_checkpoint_path val_path captions_getter model_version
iterations hours batch_size microbatch lr ema_rate precision seed save_interval sample_interval
parallel updates save_every backup_every dtype grad_accum_steps multi_aspect_ratio use_fsdp
network image_size small_size num_channels channel_mult enc_attn_dim text_length
noise_schedule prediction classifier_width classifier_depth
rank train_tokens module_filters prior_data_dir controlnet_filter
prompts prompts_file negative_prompt num_samples sampler steps guidance_scale sample_size upsampler_paths
upsampler_steps stage_b stage_a lora init_image mask strength images controlnet control_image classifier_path
classifier_scale evaluators shapes_dir report_dir metrics
gpu gpus global_batch images budget device
"""
COMMON = frozenset(_COMMON.split())


@dataclass(frozen=True)
class Group:
    """Settings that ``--help`` and the flag tables show together: a section, or the command's own."""

    title: str
    config: Any
    flags: tuple[Leaf, ...]
    in_file: tuple[Leaf, ...]  # without flags: lists of sections, sections that may be missing, and other settings

    @property
    def only_checks(self) -> bool:
        """Whether its settings set nothing, but must agree with a checkpoint's."""
        return getattr(self.config, "rule", "") == MUST_EQUAL


def groups(config_class) -> Iterator[Group]:
    """The groups of a command's settings, in order of declaration."""
    every = list(leaves(config_class))
    own = [leaf for leaf in every if len(leaf.path) == 1]
    sections = {key: member for key, member in members(config_class).items() if isinstance(member, Section)}
    if own:
        yield _group("This command", config_class, own)
    for key, member in sections.items():
        title = title_of(member.config) + (f" (flags with {member.prefix})" if member.prefix else "")
        yield _group(title, member.config, [leaf for leaf in every if len(leaf.path) > 1 and leaf.path[0] == key])


def _group(title: str, config_class, found: Sequence[Leaf]) -> Group:
    flags, in_file = [leaf for leaf in found if leaf.has_flag], [leaf for leaf in found if not leaf.has_flag]
    return Group(title, config_class, tuple(flags), tuple(in_file))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _parser(
    config_class, description: str, kinds: Sequence[str], subcommand: str, helps: bool, briefly: bool
) -> argparse.ArgumentParser:
    """The parser of a command. kinds: for ``--kind``, if the command serves several. helps: it will show its help, for
    which all presets and the examples are read; briefly: with the settings that people set alone."""
    text = usage(sys.argv[0], subcommand) if helps else ""
    sections = list(groups(config_class))
    flags = {leaf.name: group for group in sections for leaf in group.flags}
    brief = {*flags}
    if briefly and len(flags) > MOST:
        brief = {name for name, group in flags.items() if name in COMMON and not group.only_checks}
    left_out = f"{len(flags) - len(brief)} more settings: --help_all" if len(brief) < len(flags) else None
    parser = _Parser(usage=text, description=description, allow_abbrev=False, add_help=False, epilog=left_out)
    general = parser.add_argument_group("Where settings come from (defaults < preset < config file < flags and --set)")
    general.add_argument("--help", "-h", action="help", help="show this message and exit")
    text = "show all settings and exit" if left_out or not briefly else argparse.SUPPRESS
    general.add_argument("--help_all", action="help", help=text)
    if kinds:
        text = f"kind of network: {', '.join(kinds)}; default: that of the preset or config file, else {kinds[0]}"
        _add_flag(general, "kind", text, metavar="KIND", values=kinds)
    presets = presets_of(_kind_of(config_class)) if helps else []
    usable = f"named settings: {', '.join(presets)}" if presets else argparse.SUPPRESS
    _add_flag(general, "preset", usable, metavar="NAME", values=presets)
    text = "YAML or JSON file of settings, local or remote; also --config_file"
    general.add_argument("--config", "--config_file", action="append", help=text, metavar="FILE")
    _add_flag(general, "set", "any setting by its path in a config file; may be repeated", metavar="PATH=VALUE")
    _add_flag(general, "import", IMPORT_HELP, metavar="MODULE")
    _add_flag(general, "dry_run", DRY_RUN.help, boolean=True)
    for group in sections:
        section = parser.add_argument_group(group.title)
        for leaf in group.flags:
            kind = "|".join(leaf.choices) or type_name(leaf.type)
            text = f"{leaf.help} [{kind}; default {shown(leaf.default)}]"
            told = text if leaf.name in brief else argparse.SUPPRESS
            _add_flag(section, leaf.name, told, _is_boolean(leaf), values=tuple(leaf.choices))
        if left_out:
            continue
        single = [leaf.path[-1] for leaf in group.in_file if not (leaf.item or leaf.optional)]
        if single:
            path = ".".join(group.in_file[0].path[:-1])
            text = f"{', '.join(single)}; in a config file, or --set {path}.NAME=VALUE"
            parser.add_argument_group(f"{group.title}: {path}", text)  # not formatted with %, unlike help
        for leaf in group.in_file:
            if nested := leaf.item or leaf.optional:
                path, names = ".".join(leaf.path), ", ".join(inner.name for inner in leaves(nested))
                item, each = (".0", ", each") if leaf.item else ("", "")
                text = f"{leaf.help}{each} with {names}; in a config file, or --set {path}{item}.NAME=VALUE"
                parser.add_argument_group(f"{group.title}: {path}", text)
    table = by_name(config_class)
    for old, name in present_names(config_class).items():
        _add_flag(parser, old, argparse.SUPPRESS, _is_boolean(table[name]))
    if aliases := aliases_of(config_class):
        section = parser.add_argument_group("Names in Guided-Diffusion")
        for name, alias in aliases.items():
            _add_flag(section, name, argparse.SUPPRESS if left_out else alias.help, alias.is_boolean)
    return parser


def _add_flag(
    group, name: str, help: str, boolean: bool = False, metavar: str = "VALUE", values: Sequence[str] = ()
) -> None:
    """values: some that the shell may complete it with."""
    optional: dict[str, Any] = {"nargs": "?", "const": "True", "metavar": "BOOL"} if boolean else {"metavar": metavar}
    text = help if help == argparse.SUPPRESS else help.replace("%", "%%")
    action = group.add_argument(f"--{name}", action="append", help=text, **optional)
    suggest(action, ("True", "False") if boolean else values)


def _is_boolean(leaf: Leaf) -> bool:
    return leaf.type in (bool, bool | None)


def _kind_of(config_class) -> str | None:
    """The kind of network that a command trains; None for a command that trains nothing."""
    return getattr(config_class, "kind", None)


def parse(config_class, argv: Sequence[str] | None = None, description: str = "", subcommand: str = "") -> Any:
    """The command line as an instance of ``config_class``.

    subcommand: its name if the script has several, of which each has its own examples.
    ``--help`` and ``--dry_run`` print and raise SystemExit(0). Raises InputError for bad settings, for a preset or
    config file of another kind than ``config_class.kind``, and, after a dry run's settings, for a missing package.
    """
    return _parse(config_class, list(sys.argv[1:] if argv is None else argv), description, subcommand=subcommand)


def parse_kind(
    classes: Mapping[str, Any], argv: Sequence[str] | None = None, description: str = "", subcommand: str = ""
) -> Any:
    """``parse`` for a command that serves several kinds, with the config class of the kind: that of the flag
    ``--kind``, of the preset or of the config file, else the first of ``classes``.

    Raises InputError as well for another kind and for a flag that contradicts the preset or file.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    flag, default = "".join(values_on(argv, ("--kind",))[:1]), next(iter(classes))
    if flag and flag not in classes:
        hint = _adapter_hint(flag, classes) or nearest(flag, classes)
        raise InputError(f"--kind is {flag!r}, but must be one of {', '.join(classes)}{hint}")
    said = {source.name: source.kind for source in sources_on(argv) if source.kind}
    for name, kind in said.items():
        if flag and flag != kind:
            raise InputError(f"--kind is {flag}, but {name} is for a {kind}: leave --kind out")
        if kind not in classes:
            raise InputError(
                f"{name} holds settings for training a {kind} by {TRAINING_COMMANDS[kind].script}, but this command "
                f"takes those of {', '.join(classes)}{_adapter_hint(kind, classes)}"
            )
    kind = flag or next(iter(said.values()), default)
    return _parse(classes[kind], argv, description, list(classes), subcommand)


def _adapter_hint(kind: str, classes: Mapping[str, Any]) -> str:
    """What to give instead of the settings of an adapter to a command that takes networks only."""
    adapters = {name for name, command in TRAINING_COMMANDS.items() if command.over_base}
    if kind not in adapters or adapters & classes.keys():
        return ""
    return ": an adapter depends on its base, so give the settings of that network, which it needs the memory of"


def _single(given: Mapping[str, list[str] | None]) -> dict[str, str]:
    """Flags with their texts. Raises InputError for one that is given twice."""
    for name, texts in given.items():
        if texts and len(texts) > 1:
            raise InputError(f"--{name} is given {len(texts)} times; give it once")
    return {name: texts[0] for name, texts in given.items() if texts is not None}


def _parse(config_class, argv: Sequence[str], description: str, kinds: Sequence[str] = (), subcommand: str = "") -> Any:
    helps = is_asked() or not {*HELPS}.isdisjoint(argv)
    if not helps:  # which is shown without torch
        import_parts(argv)
    parser = _parser(config_class, description, kinds, subcommand, helps, "--help_all" not in argv)
    complete(parser, subcommand)
    kind = _kind_of(config_class)
    namespace, unknown = parser.parse_known_args(argv)
    unknown = [word for word in unknown if word != "--"]  # the end of the flags
    if unknown:
        flags = [leaf.name for leaf in leaves(config_class) if leaf.has_flag]
        known = [*flags, *aliases_of(config_class), *GENERAL, *(["kind"] if kinds else [])]
        bad = unknown[0].split("=")[0]
        hint = nearest(bad, [f"--{name}" for name in known])
        raise InputError(f"unknown flag or argument {bad!r}{hint} (--help_all lists all flags)")
    texts = vars(namespace)
    assignments = texts.pop("set") or []
    del texts["import"]
    given = _single(texts)
    settings = Settings(config_class, given.get("config", ""))
    for source in sources_on(argv):
        settings.take(source)
    general = {*GENERAL, *(["kind"] if kinds else [])}
    settings.take_flags({name: text for name, text in given.items() if name not in general}, assignments)
    config = settings.settled()
    if "dry_run" in given and checked(DRY_RUN, FlagText(given["dry_run"]), "dry_run"):
        sys.stdout.write((f"kind: {kind}\n" if kind else "") + dump(config))
        if hasattr(config, "recipe"):
            config.recipe().check_packages()
        raise SystemExit(0)
    return config


@dataclass(frozen=True)
class Subcommand:
    """config: class of its settings; run: does the work, returns lines to print."""

    description: str
    config: type
    run: Callable[[Any], list[str]]


def run_subcommand(commands: Mapping[str, Subcommand], description: str) -> list[str]:
    """Run the command of ``commands`` that the command line says. Returns lines to print. ``--help`` and ``--dry_run``
    print and raise SystemExit(0); InputError for bad settings."""
    epilog = "COMMAND --help lists the flags of a command"
    parser = argparse.ArgumentParser(usage=usage(sys.argv[0], "COMMAND"), description=description, epilog=epilog)
    parser.add_argument("--help_all", action="help", help=argparse.SUPPRESS)  # which each command has
    parser.add_argument("command", choices=commands)
    if not sys.argv[1:2]:
        complete(parser)
    name = parser.parse_args(sys.argv[1:2]).command
    command = commands[name]
    return command.run(parse(command.config, sys.argv[2:], command.description, name))
