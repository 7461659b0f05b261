"""Model cards: what the files of a model are, how they were trained and how they score, from what is recorded.

The front matter is that of the Hugging Face hub. Nothing is guessed: what no file records is called "not recorded".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import storage
from ..checkpoints.checkpoint import ROLES, load_file
from ..checkpoints.kinds import KINDS, find_kind
from ..checkpoints.lora_file import Lora
from ..config import Section as ConfigSection
from ..config import entries, leaves, members, present_keys, quantity, shown
from ..config.yaml_text import to_yaml
from ..evaluation.report import Figure, Part, Section, Table, rendered
from ..recipes.planning.cost import NetworkCost, networks_of_file
from .training_facts import TrainingFacts, training_facts
from .usage import lora_usage, model_usage

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
class _Described:
    """What a file and its run record. content: its header."""

    file: CardFile
    content: Mapping[str, Any]
    facts: TrainingFacts
    networks: Sequence[NetworkCost]

    @classmethod
    def of(cls, file: CardFile) -> _Described:
        content = load_file(file.path)
        header = {name: value for name, value in content.items() if name != "state"}
        return cls(file, header, training_facts(file.path, content), networks_of_file(content))

    @property
    def settings(self) -> Any:
        return self.networks[0].settings

    def sides(self, network: NetworkCost) -> tuple[int, int]:
        """The width in pixels of a network's images, and of those or the crops of them that it was trained on."""
        size = self.content["config"].get("image_size") if self.settings.name in ("stage_a", "semantic") else None
        return (
            (size, size) if size and isinstance(size, int) else (network.size, network.trained)
        )  # those take any size

    def sizes(self, which: int) -> str:
        return " and ".join(
            dict.fromkeys(f"{self.sides(each)[which]}×{self.sides(each)[which]}" for each in self.networks)
        )

    def total_flops(self, network: NetworkCost) -> int | None:
        """Of a network's training; None = not recorded."""
        # An assembled decoder has the samples of that of its U-Nets which saw most; a run trains all its networks on
        # all. The training of a ControlNet includes a base that is not trained.
        is_part = not self.content["trainee"] and len(self.networks) > 1
        if (is_part and self.facts.batch is None) or self.settings.role == "controlnet":
            return None
        return 3 * network.flops(self.sides(network)[1]) * self.content["samples"]


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
    found = [_Described.of(file) for file in files]
    about: list[Part] = ["\n".join(f"* `{each.file.name}`: {_sentence(each)}." for each in found)]
    about += [Figure(name, title=title) for title, name in samples]
    about += [
        Section("Use", [_use(found, texts)]),
        Section("Data", [_data(found)]),
        Section("Compute", _compute(found)),
    ]
    hyperparameters = [Section(each.file.name, [_hyperparameters(each)]) for each in found]
    front = _front_matter(found[0].settings.described[1], texts)
    return _card(front, texts, about, scores, _limits(found), hyperparameters)


def lora_card(
    lora: Lora, texts: CardTexts, scores: Mapping[str, Any] | None = None, samples: Sequence[tuple[str, str]] = ()
) -> str:
    """A LoRA's card in Markdown: what it changes, and what its file and its report record. Arguments as for
    ``model_card``."""
    about, kind = lora.about, find_kind(lora.about.kind)
    of = f"{kind.title}, {about.trainee}" if about.trainee else kind.title
    modules, count = {name.rpartition(".")[0] for name in lora.pairs}, sum(t.numel() for t in lora.tensors.values())
    size = f"rank {about.rank}, {quantity(len(modules), 'module')}, {quantity(count, 'parameter')}"
    trained = f"It was trained for the weights `{about.base}`; over others it is refused, unless they are accepted"
    use = [
        _example(*lora_usage(about.kind, texts.location, texts.prompt)),
        f"{trained} (`--accept_changed_base True`).",
    ]
    parts: list[Part] = [f"* `lora.safetensors`: LoRA of a {of}, {size}."]
    parts += [*(Figure(name, title=title) for title, name in samples), Section("Use", use)]
    rows = [[name, shown(getattr(about, name))] for name in ("rank", "alpha", "module_filters", "train_tokens")]
    return _card(_front_matter(kind.does, texts, "lora"), texts, parts, scores, [], [Table(["setting", "value"], rows)])


def _card(
    front: str,
    texts: CardTexts,
    about: Sequence[Part],
    scores: Mapping[str, Any] | None,
    limits: Sequence[str],
    hyperparameters: Sequence[Part],
) -> str:
    tables = list(score_tables(scores or {}))
    lines = filter(None, [texts.limits, *limits, "* Prompts and images are not filtered."])
    end = [
        *([Section("Scores", ["In parentheses: 95 % intervals.", *tables])] if tables else []),
        Section("Limits", ["\n".join(lines)]),
        Section("License", [texts.license or f"The license is {UNKNOWN}."]),
        Section("Hyperparameters", hyperparameters),
    ]
    return rendered([front, Section(texts.title, [texts.description, *about, *end])]) + "\n"


def _front_matter(does: str, texts: CardTexts, *tags: str) -> str:
    """What the hub reads. does: its name for what the model does."""
    values: dict[str, Any] = {"license": texts.license} if texts.license else {}
    values |= {"library_name": "diff_dalle", "pipeline_tag": does, "tags": ["diffusion", does, *tags]}
    return f"---\n{to_yaml(values).strip()}\n---"


def _sentence(each: _Described) -> str:
    return (
        f"{each.settings.described[0]}, {each.sizes(0)} pixels, "
        f"{quantity(sum(network.parameters for network in each.networks), 'parameter')}, "
        f"{ROLES[each.content['role']]} after {quantity(each.content['step'], 'step')}, in {each.file.precision}"
    )


# ---------------------------------------------------------------------------------------------------------------- parts


def _use(found: Sequence[_Described], texts: CardTexts) -> str:
    """The command and the Python that use the model."""
    first, location = found[0], texts.location
    path = storage.join(location, first.file.name) if first.file.role == "stage_b" else location
    roles = [each.file.role for each in found]
    return _example(*model_usage(first.settings, first.content["trainee"], path, texts.prompt, roles))


def _example(command: str, code: str) -> str:
    return f"```bash\n{command}\n```\n\n```python\nimport diff_dalle\n\n{code}\n```"


def _data(found: Sequence[_Described]) -> Table:
    rows = []
    for each in found:
        seen, held_out = (", then ".join(each.facts.data.get(name, ())) for name in ("data_dir", "val_data_dir"))
        start = {None: UNKNOWN, True: "random", False: "those of another checkpoint"}[each.facts.from_scratch]
        rows.append([each.file.name, seen or UNKNOWN, held_out or UNKNOWN, start])
    return Table(["file", "training data", "held-out data", "initial weights"], rows)


def _known(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else f"{value:{form}}"


def _compute(found: Sequence[_Described]) -> list[Part]:
    rows = []
    for each in found:
        for network in each.networks:
            name = f"{each.file.name}, {network.trainee}" if network.trainee else each.file.name
            row = [name, f"{network.parameters:,}", f"{each.content['step']:,}", f"{each.content['samples']:,}"]
            row += [_known(each.facts.batch, ","), f"{network.flops(each.sides(network)[1]) / 1e9:,.3g}"]
            rows.append([*row, _known(each.total_flops(network), ".3g"), _known(each.facts.hours, ".3g")])
    header = ["network", "parameters", "steps", "samples", "batch", "GFLOPs per image", "FLOPs of training", "hours"]
    return [
        Table(header, rows),
        "*GFLOPs per image*: forward pass over one training image; a multiply-add counts as two. *FLOPs of training*: "
        "three forward passes per sample, for forward and backward pass of this network alone. *Hours*: of the run "
        "on its devices, evaluations included.",
    ]


def _limits(found: Sequence[_Described]) -> list[str]:
    lines = []
    for each in found:
        crops = "" if each.sizes(0) == each.sizes(1) else f", in crops of {each.sizes(1)}"
        lines.append(f"* `{each.file.name}` was trained on images of {each.sizes(0)} pixels{crops}.")
        text = getattr(getattr(each.settings, "model", None), "text", None)
        length = getattr(each.settings.model, "text_length", None) if each.settings.name == "classifier" else None
        if length is None and text is not None and text.enc_attn_dim:
            length = text.text_length
        if length:
            lines.append(f"* `{each.file.name}` reads the first {length - 2} tokens of a text.")
    return lines


def _hyperparameters(each: _Described) -> Table:
    rows = [*_settings(each), ["tokenizer", "identity", each.content["tokenizer"] or "none"]]
    return Table(["section", "setting", "value"], rows)


def _settings(each: _Described) -> Iterator[list[str]]:
    """(section, name, value) of what a file records, without texts that may say where something lies on a machine."""
    training = KINDS[each.settings.name].training
    config_class: Any = training.config_class if training else type(each.settings)
    present, found = present_keys(config_class), members(config_class)
    for key, value in each.content["config"].items():
        key = present.get(key, key)
        member = found.get(key)
        if key in LEFT_OUT or member is None:
            continue
        if key == "preview" and isinstance(member, ConfigSection):  # of it, the guidance is that of all sampling
            key, member, value = "guidance", members(member.config)["guidance"], value.get("guidance", {})
        if isinstance(member, ConfigSection):
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


# --------------------------------------------------------------------------------------------------------------- scores


def score_tables(scores: Mapping[str, Any]) -> Iterator[Section]:
    """Tables of the scores in an evaluation report's scores.json, by evaluator. Lists, which are curves, are left out.

    A score is a number, or a mapping that has its interval: score or value, low, high.
    """
    for title, group in scores.items():
        if isinstance(group, Mapping) and (tables := list(_tables(group))):
            yield Section(title, tables)


def _tables(group: Mapping[str, Any]) -> Iterator[Table]:
    """Of a group: tasks, each with its chance and number; a value each; rows of values."""
    rows = {name: row for name, row in group.items() if isinstance(row, Mapping)}
    tasks = {name: row for name, row in rows.items() if _is_number(row.get("score")) and _score(row)}
    if tasks:
        columns = [name for name in ("chance", "n") if any(_is_number(row.get(name)) for row in tasks.values())]
        found = [[name, _score(row), *(_score(row.get(each)) for each in columns)] for name, row in tasks.items()]
        yield Table(["task", "score", *columns], found)
    if single := [[name, text] for name, value in group.items() if name not in tasks and (text := _score(value))]:
        yield Table(["", "value"], single)
    wide = {name: row for name, row in rows.items() if not _score(row) and any(map(_score, row.values()))}
    if wide:
        columns = list(dict.fromkeys(key for row in wide.values() for key, value in row.items() if _score(value)))
        found = [[name, *(_score(row.get(column)) for column in columns)] for name, row in wide.items()]
        yield Table(["", *columns], found)


def _score(value: Any) -> str:
    """A score in a cell, with its interval; "" for anything else."""
    if isinstance(value, Mapping):
        found, low, high = (
            _score(each) for each in (value.get("score", value.get("value")), value.get("low"), value.get("high"))
        )
        return f"{found} ({low} – {high})" if found and low and high else ""
    return _short(value) if _is_number(value) else ""


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
