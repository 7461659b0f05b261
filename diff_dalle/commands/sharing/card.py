"""Model cards: what the files of a model are, how they were trained and how they score, from what is recorded.

The front matter is that of the Hugging Face hub. Nothing is guessed: what no file records is called "not recorded".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import storage
from ...checkpoints.checkpoint import ROLES, load_file
from ...checkpoints.kind import NetworkKind
from ...checkpoints.kinds import find_kind
from ...checkpoints.lora_file import Lora
from ...config import Section, entries, leaves, members, present_keys, shown
from ...config.yaml_text import to_yaml
from ...distributed.devices import without_values
from ...errors import quantity
from ...evaluation.report import markdown_table
from ...models.cost import count_flops
from ..info import vocabulary_size
from ..training_commands import TRAINING_COMMANDS
from .score_tables import score_tables
from .training_facts import TrainingFacts, training_facts
from .usage import lora_usage, usage

UNKNOWN = "not recorded"
# Sections of a run's settings that do not affect what is learned, or that say where something lies.
LEFT_OUT = ("data", "tracking", "tracker", "distributed", "sharding", "evaluate", "tokenizer")


@dataclass(frozen=True)
class CardFile:
    """A file of a model. role: the setting that takes it, of ``model_folder.ROLES``; name: in the model's folder; path:
    of the checkpoint, whose folder may hold the records of its run; precision: of the weights there."""

    role: str
    name: str
    path: str
    precision: str


@dataclass(frozen=True)
class CardTexts:
    """What only people know. location: where the model can be loaded from; prompt: of examples. Empty texts are left
    out or "not recorded"."""

    title: str
    location: str
    prompt: str
    license: str = ""
    description: str = ""
    limits: str = ""


@dataclass(frozen=True)
class _Network:
    """One network of a file. sizes: width in pixels of its images, and of those or the crops of them that it was
    trained on; flops: of a forward pass over one of the latter; total: of its training, None = not recorded."""

    name: str
    parameters: int
    sizes: tuple[int, int]
    flops: int
    total: int | None


@dataclass(frozen=True)
class _Described:
    """What a file and its run record. content: its header."""

    file: CardFile
    content: Mapping[str, Any]
    settings: Any
    facts: TrainingFacts
    networks: tuple[_Network, ...]


def model_card(
    files: Sequence[CardFile],
    texts: CardTexts,
    scores: Mapping[str, Any] | None = None,
    samples: Sequence[tuple[str, str]] = (),
) -> str:
    """The card of a model in Markdown, whose first file is the one that it is known for.

    scores:  the content of an evaluation report's scores.json.
    samples: (title, file name in the model's folder) of pictures.

    Raises InputError for a file that is no checkpoint, and for damaged records of its run.
    """
    found = [_describe(file) for file in files]
    hyperparameters = [part for each in found for part in (f"### {each.file.name}", _hyperparameters(each))]
    return _assembled(
        texts,
        _front_matter(found[0].settings.described[1], texts),
        "\n".join(f"* `{each.file.name}`: {_sentence(each)}." for each in found),
        samples,
        [_use(found, texts), "## Data", _data(found), "## Compute", _compute(found)],
        scores,
        _limits(found),
        hyperparameters,
    )


def lora_card(
    lora: Lora, texts: CardTexts, scores: Mapping[str, Any] | None = None, samples: Sequence[tuple[str, str]] = ()
) -> str:
    """A LoRA's card in Markdown: what it changes, and what its file and its report record. Arguments as for
    ``model_card``."""
    about = lora.about
    kind = find_kind(about.kind)
    of = f"{kind.title}, {about.trainee}" if about.trainee else kind.title
    modules, count = {name.rpartition(".")[0] for name in lora.pairs}, sum(t.numel() for t in lora.tensors.values())
    size = f"rank {about.rank}, {quantity(len(modules), 'module')}, {quantity(count, 'parameter')}"
    trained = f"It was trained for the weights `{about.base}`; over others it is refused, unless they are accepted"
    rows = [[name, shown(getattr(about, name))] for name in ("rank", "alpha", "module_filters", "train_tokens")]
    return _assembled(
        texts,
        _front_matter(kind.does, texts, "lora"),
        f"* `lora.safetensors`: LoRA of a {of}, {size}.",
        samples,
        [_example(*lora_usage(about.kind, texts.location, texts.prompt)), f"{trained} (`--accept_changed_base True`)."],
        scores,
        [],
        [markdown_table(["setting", "value"], rows)],
    )


def _assembled(
    texts: CardTexts,
    front: str,
    files: str,
    samples: Sequence[tuple[str, str]],
    use: Sequence[str],
    scores: Mapping[str, Any] | None,
    limits: Sequence[str],
    hyperparameters: Sequence[str],
) -> str:
    parts = [front, f"# {texts.title}", texts.description, files]
    parts += [*(f"![{title}]({name})" for title, name in samples), "## Use", *use]
    if tables := list(score_tables(scores or {})):
        parts += ["## Scores", "In parentheses: 95 % intervals.", *tables]
    all_limits = [texts.limits, *limits, "* Prompts and images are not filtered."]
    parts += ["## Limits", "\n".join(filter(None, all_limits))]
    parts += ["## License", texts.license or f"The license is {UNKNOWN}.", "## Hyperparameters", *hyperparameters]
    return "\n\n".join(filter(None, parts)) + "\n"


def _describe(file: CardFile) -> _Described:
    content = load_file(file.path)
    settings = find_kind(content["kind"]).read(content["config"])
    names = (content["trainee"],) if content["trainee"] else settings.trainees
    facts = training_facts(file.path, content)
    words = vocabulary_size(content["state"])
    networks = tuple(_network(settings, content, facts, words, name) for name in names)
    header = {name: value for name, value in content.items() if name != "state"}
    return _Described(file, header, settings, facts, networks)


def _network(
    settings: NetworkKind, content: Mapping[str, Any], facts: TrainingFacts, words: int, name: str
) -> _Network:
    """words: size of the vocabulary."""
    probe = settings.probe(name)
    side = _trained_size(settings, content)
    sizes = (side, side) if side else probe.sizes
    with without_values():
        network: nn.Module = settings.build(words, name)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        flops = count_flops(network, lambda model: probe.forward(model, 1, sizes[1]))
    # An assembled decoder has the samples of that of its U-Nets which saw most; a run trains all its networks on all.
    is_known = facts.batch is not None or not _is_part(settings, content)
    # The training of a ControlNet includes a base that is not trained.
    total = 3 * flops * content["samples"] if is_known and settings.role != "controlnet" else None
    return _Network(name, parameters, sizes, flops, total)


def _is_part(settings: NetworkKind, content: Mapping[str, Any]) -> bool:
    return not content["trainee"] and len(settings.trainees) > 1


def _trained_size(settings: NetworkKind, content: Mapping[str, Any]) -> int:
    """The width in pixels that an autoencoder, which takes all sizes, was trained on; 0 = its settings say it."""
    size = content["config"].get("image_size") if settings.name in ("stage_a", "semantic") else None
    return size if isinstance(size, int) else 0


def _front_matter(does: str, texts: CardTexts, *tags: str) -> str:
    """What the hub reads. does: its name for what the model does."""
    values: dict[str, Any] = {"license": texts.license} if texts.license else {}
    values |= {"library_name": "diff_dalle", "pipeline_tag": does, "tags": ["diffusion", does, *tags]}
    return f"---\n{to_yaml(values).strip()}\n---"


def _sentence(each: _Described) -> str:
    return (
        f"{each.settings.described[0]}, {_sizes(each, 0)} pixels, "
        f"{quantity(sum(network.parameters for network in each.networks), 'parameter')}, "
        f"{ROLES[each.content['role']]} after {quantity(each.content['step'], 'step')}, in {each.file.precision}"
    )


def _sizes(each: _Described, which: int) -> str:
    sides = dict.fromkeys(network.sizes[which] for network in each.networks)
    return " and ".join(f"{side}×{side}" for side in sides)


# ---------------------------------------------------------------------------------------------------------------- parts


def _use(found: Sequence[_Described], texts: CardTexts) -> str:
    """The command and the Python that use the model."""
    first, location = found[0], texts.location
    path = storage.join(location, first.file.name) if first.file.role == "stage_b" else location
    roles = [each.file.role for each in found]
    return _example(*usage(first.settings.name, first.settings, first.content["trainee"], path, texts.prompt, roles))


def _example(command: str, code: str) -> str:
    return f"```bash\n{command}\n```\n\n```python\nimport diff_dalle\n\n{code}\n```"


def _data(found: Sequence[_Described]) -> str:
    rows = []
    for each in found:
        seen, held_out = (", then ".join(each.facts.data.get(name, ())) for name in ("data_dir", "val_data_dir"))
        start = {None: UNKNOWN, True: "random", False: "those of another checkpoint"}[each.facts.from_scratch]
        rows.append([each.file.name, seen or UNKNOWN, held_out or UNKNOWN, start])
    return markdown_table(["file", "training data", "held-out data", "initial weights"], rows)


def _compute(found: Sequence[_Described]) -> str:
    rows = []
    for each in found:
        for network in each.networks:
            name = f"{each.file.name}, {network.name}" if network.name else each.file.name
            row = [name, f"{network.parameters:,}", f"{each.content['step']:,}", f"{each.content['samples']:,}"]
            row += [UNKNOWN if each.facts.batch is None else f"{each.facts.batch:,}"]
            row += [f"{network.flops / 1e9:,.3g}", UNKNOWN if network.total is None else f"{network.total:.3g}"]
            row += [UNKNOWN if each.facts.hours is None else f"{each.facts.hours:.3g}"]
            rows.append(row)
    header = ["network", "parameters", "steps", "samples", "batch", "GFLOPs per image", "FLOPs of training", "hours"]
    return (
        f"{markdown_table(header, rows)}\n\n"
        "*GFLOPs per image*: forward pass over one training image; a multiply-add counts as two. *FLOPs of training*: "
        "three forward passes per sample, for forward and backward pass of this network alone. *Hours*: of the run "
        "on its devices, evaluations included."
    )


def _limits(found: Sequence[_Described]) -> list[str]:
    lines = []
    for each in found:
        crops = "" if _sizes(each, 0) == _sizes(each, 1) else f", in crops of {_sizes(each, 1)}"
        lines.append(f"* `{each.file.name}` was trained on images of {_sizes(each, 0)} pixels{crops}.")
        text = getattr(getattr(each.settings, "model", None), "text", None)
        length = getattr(each.settings.model, "text_length", None) if each.settings.name == "classifier" else None
        if length is None and text is not None and text.enc_attn_dim:
            length = text.text_length
        if length:
            lines.append(f"* `{each.file.name}` reads the first {length - 2} tokens of a text.")
    return lines


def _hyperparameters(each: _Described) -> str:
    rows = [*_settings(each), ["tokenizer", "identity", each.content["tokenizer"] or "none"]]
    return markdown_table(["section", "setting", "value"], rows)


def _settings(each: _Described) -> Iterator[list[str]]:
    """(section, name, value) of what a file records, without texts that may say where something lies on a machine."""
    command = TRAINING_COMMANDS.get(each.settings.name)
    config_class: Any = command.config_class if command else type(each.settings)
    present, found = present_keys(config_class), members(config_class)
    for key, value in each.content["config"].items():
        key = present.get(key, key)
        member = found.get(key)
        if key in LEFT_OUT or member is None:
            continue
        if key == "preview" and isinstance(member, Section):  # of it, the guidance is that of all sampling
            key, member, value = "guidance", members(member.config)["guidance"], value.get("guidance", {})
        if isinstance(member, Section):
            chosen = set(_with_choices(member.config))
            listed = entries(member.config, value)
            rows = [(name, inner) for name, free, inner in listed if not (free and key == "training")]
        else:
            chosen, rows = {key} if member.choices else set(), [(key, value)]
        for name, inner in rows:
            if name.rpartition(".")[2] in chosen or not _holds_text(inner):
                yield [key, name, shown(inner)]


def _with_choices(config_class: Any) -> Iterator[str]:
    """The names of the settings with a few allowed values, nested ones included."""
    for leaf in leaves(config_class):
        if nested := leaf.item or leaf.optional:
            yield from _with_choices(nested)
        elif leaf.choices:
            yield leaf.path[-1]


def _holds_text(value: Any) -> bool:
    """Whether any of nested plain values is a text, but no number."""
    if isinstance(value, Mapping):
        return any(map(_holds_text, value.values()))
    if isinstance(value, list):
        return any(map(_holds_text, value))
    return isinstance(value, str) and not value.isdecimal()
