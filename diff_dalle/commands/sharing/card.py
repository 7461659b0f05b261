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
from ...checkpoints.kinds import Kind, find_kind
from ...config import Section, entries, leaves, members, present_keys, shown
from ...config.yaml_text import to_yaml
from ...distributed.devices import without_values
from ...errors import quantity
from ...evaluation.report import markdown_table
from ...models.cost import count_flops
from ..training_commands import TRAINING_COMMANDS
from .score_tables import score_tables
from .training_facts import TrainingFacts, training_facts
from .usage import usage

UNKNOWN = "not recorded"
ADAPTERS = ("controlnet", "stage_c_controlnet")  # whose training includes a base that is not trained
# Sections of a run's settings that do not affect what is learned, or that say where something lies.
LEFT_OUT = ("data", "tracking", "tracker", "distributed", "sharding", "evaluate", "tokenizer")
# (what it is, the hub's name for what it does) by kind.
_GENERATOR = {
    "text": ("text-to-image generator", "text-to-image"),
    "class": ("class-conditional image generator", "unconditional-image-generation"),
    "none": ("unconditional image generator", "unconditional-image-generation"),
    "upsampler": ("upsampler", "image-to-image"),
}
KINDS = {
    "classifier": ("CLIP", "zero-shot-image-classification"),
    "noisy_classifier": ("classifier of noisy images into classes", "image-classification"),
    "decoder": ("decoder of CLIP image embeddings", "image-to-image"),
    "stage_a": ("stage A of a latent cascade, an autoencoder", "image-to-image"),
    "semantic": ("semantic encoder of a latent cascade, with its previewer", "image-feature-extraction"),
    "stage_b": ("stage B of a latent cascade, from semantic latents to those of stage A", "image-to-image"),
    "stage_c": ("stage C of a latent cascade, from text to semantic latents", "text-to-image"),
    "controlnet": ("ControlNet of a generator", "text-to-image"),
    "stage_c_controlnet": ("ControlNet of stage C", "text-to-image"),
}


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
    kind: Kind
    settings: Any
    facts: TrainingFacts
    networks: tuple[_Network, ...]

    @property
    def what(self) -> tuple[str, str]:
        """What it is, and the hub's name for what it does."""
        if self.kind.name == "classifier":
            noised = "trained on noised images" if self.settings.contrastive.noised else "trained on clean images"
            return f"{KINDS['classifier'][0]} {noised}", KINDS["classifier"][1]
        if self.kind.name != "generator":
            return KINDS[self.kind.name]
        model = self.settings.model
        if model.is_upsampler:
            noun, does = _GENERATOR["upsampler"]
            return f"{noun} of images of {model.low_res.small_size}×{model.low_res.small_size} pixels", does
        if model.text.enc_attn_dim:
            return _GENERATOR["text"]
        return _GENERATOR["class" if model.unet.num_classes else "none"]


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
    parts = [
        front_matter(found[0].what[1], texts),
        f"# {texts.title}",
        texts.description,
        "\n".join(f"* `{each.file.name}`: {_sentence(each)}." for each in found),
        *(f"![{title}]({name})" for title, name in samples),
        "## Use",
        _use(found, texts),
        "## Data",
        _data(found),
        "## Compute",
        _compute(found),
    ]
    if tables := list(score_tables(scores or {})):
        parts += ["## Scores", "In parentheses: 95 % intervals.", *tables]
    parts += ["## Limits", _limits(found, texts), "## License", texts.license or f"The license is {UNKNOWN}."]
    parts += ["## Hyperparameters"]
    for each in found:
        parts += [f"### {each.file.name}", _hyperparameters(each)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _describe(file: CardFile) -> _Described:
    content = load_file(file.path)
    kind = find_kind(content["kind"])
    settings = kind.read_settings(content["config"])
    names = (content["trainee"],) if content["trainee"] else kind.trainees(settings)
    facts = training_facts(file.path, content)
    words = next((len(value) for name, value in content["state"].items() if name.endswith("token_emb.weight")), 0)
    networks = tuple(_network(kind, settings, content, facts, words, name) for name in names)
    header = {name: value for name, value in content.items() if name != "state"}
    return _Described(file, header, kind, settings, facts, networks)


def _network(
    kind: Kind, settings: Any, content: Mapping[str, Any], facts: TrainingFacts, words: int, name: str
) -> _Network:
    """words: size of the vocabulary."""
    probe = kind.probe(settings, name)
    side = _trained_size(kind, content)
    sizes = (side, side) if side else probe.sizes
    with without_values():
        network: nn.Module = kind.build(settings, words, name)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        flops = count_flops(network, lambda model: probe.forward(model, 1, sizes[1]))
    # An assembled decoder has the samples of that of its U-Nets which saw most; a run trains all its networks on all.
    is_known = facts.batch is not None or not _is_part(kind, settings, content)
    total = 3 * flops * content["samples"] if is_known and kind.name not in ADAPTERS else None
    return _Network(name, parameters, sizes, flops, total)


def _is_part(kind: Kind, settings: Any, content: Mapping[str, Any]) -> bool:
    return not content["trainee"] and len(kind.trainees(settings)) > 1


def _trained_size(kind: Kind, content: Mapping[str, Any]) -> int:
    """The width in pixels that an autoencoder, which takes all sizes, was trained on; 0 = its settings say it."""
    size = content["config"].get("image_size") if kind.name in ("stage_a", "semantic") else None
    return size if isinstance(size, int) else 0


def front_matter(does: str, texts: CardTexts, *tags: str) -> str:
    """What the hub reads. does: its name for what the model does."""
    values: dict[str, Any] = {"license": texts.license} if texts.license else {}
    values |= {"library_name": "diff_dalle", "pipeline_tag": does, "tags": ["diffusion", does, *tags]}
    return f"---\n{to_yaml(values).strip()}\n---"


def _sentence(each: _Described) -> str:
    return (
        f"{each.what[0]}, {_sizes(each, 0)} pixels, "
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
    command, code = usage(first.kind.name, first.settings, first.content["trainee"], path, texts.prompt, roles)
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


def _limits(found: Sequence[_Described], texts: CardTexts) -> str:
    lines = [texts.limits] if texts.limits else []
    for each in found:
        crops = "" if _sizes(each, 0) == _sizes(each, 1) else f", in crops of {_sizes(each, 1)}"
        lines.append(f"* `{each.file.name}` was trained on images of {_sizes(each, 0)} pixels{crops}.")
        text = getattr(getattr(each.settings, "model", None), "text", None)
        length = getattr(each.settings.model, "text_length", None) if each.kind.name == "classifier" else None
        if length is None and text is not None and text.enc_attn_dim:
            length = text.text_length
        if length:
            lines.append(f"* `{each.file.name}` reads the first {length - 2} tokens of a text.")
    lines.append("* Prompts and images are not filtered.")
    return "\n".join(lines)


def _hyperparameters(each: _Described) -> str:
    rows = [*_settings(each), ["tokenizer", "identity", each.content["tokenizer"] or "none"]]
    return markdown_table(["section", "setting", "value"], rows)


def _settings(each: _Described) -> Iterator[list[str]]:
    """(section, name, value) of what a file records, without texts that may say where something lies on a machine."""
    command = TRAINING_COMMANDS.get(each.kind.name)
    config_class = command.config_class if command else each.kind.settings
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
                yield [key, name, _spelled(inner)]


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


def _spelled(value: Any) -> str:
    return shown(tuple(value) if isinstance(value, list) else value)
