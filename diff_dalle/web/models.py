"""The models that are served: by name, each with the upsamplers, classifier, LoRAs and ControlNet that go with it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..checkpoints.model_folder import ModelFolder, open_model, trained_models
from ..commands.demo import emoji, shapes
from ..commands.serve import ModelsConfig
from ..config import Fault, InputError, nearest
from ..sampling.classifier import check_guided, load_guide
from ..sampling.lora import Loras, of_guides
from ..sampling.pipeline import Pipeline, load
from ..sampling.stage_settings import BASE, StageFlags
from .refusal import Refusal

EXAMPLES = {"emoji": emoji.PROMPTS, "shapes": shapes.PROMPTS}


@dataclass
class Served:
    """One model: where its files are, and what its first network reads (filled in when it is first loaded)."""

    name: str
    path: str
    upsamplers: list[str] = field(default_factory=list)
    classifier: str = ""
    loras: dict[str, str] = field(default_factory=dict)  # by name
    controlnet: str = ""
    has_text: bool = False
    num_classes: int = 0
    size: int = 0
    kinds: tuple[StageFlags, ...] = (BASE,)  # of its stages
    has_no: tuple[str, ...] = ()  # settings that its first stage does not have
    sampler: str = ""
    steps: int = 0
    guidable: bool = False
    guidance: float = 1.0
    examples: Sequence[str] = ()  # prompts

    def about(self) -> dict:
        """What a request can ask of it, as plain values; no paths."""
        return {
            "name": self.name,
            "size": self.size,
            "stages": len(self.kinds),
            "text": self.has_text,
            "classes": self.num_classes,
            "classifier": bool(self.classifier),
            "lora": list(self.loras),
            "controlnet": bool(self.controlnet),
            "sampler": self.sampler,
            "steps": self.steps,
            "guidance_scale": self.guidance,
        }


class Models:
    """All models, whose pipelines stay in memory.

    A request's LoRAs and ControlNet make another pipeline of its model: one of these is kept beside the plain ones, so
    that memory does not grow with what was asked for.

    Raises InputError for a model that cannot be loaded, two of one name, and files that belong to no model.
    """

    def __init__(self, config: ModelsConfig, device):
        self.device, self.precision = device, config.precision
        self._plain: dict[str, Pipeline] = {}
        self._adapted: dict[tuple, Pipeline] = {}
        self.served: dict[str, Served] = {}
        for given in config.models or tuple(trained_models()):
            name, path = _named(given)
            if name in self.served:
                raise InputError(Fault("models", f"has two of the name {name}: name one of them, as NAME=PATH"))
            self.served[name] = Served(name, path)
        if not self.served:
            raise InputError(Fault("models", "is none, and no model is bundled: give checkpoints"))
        for model, path in self._of_models(config.upsampler_paths, "upsampler_paths"):
            model.upsamplers.append(path)
        for model, given in self._of_models(config.lora, "lora"):
            name, path = _named(given)
            if name in model.loras:
                rule = f"has two of the name {name} for the model {model.name}: name one of them, as NAME=PATH"
                raise InputError(Fault("lora", rule))
            model.loras[name] = path
        for model, path in self._of_models(config.classifier_path, "classifier_path", once=True):
            model.classifier = path
        for model, path in self._of_models(config.controlnet, "controlnet", once=True):
            model.controlnet = path
        for model in self.served.values():
            self._open(model)

    def _of_models(self, given: Sequence[str], flag: str, once: bool = False) -> list[tuple[Served, str]]:
        """once: for each model at most one."""
        found: list[tuple[Served, str]] = []
        for text in given:
            name, _, path = text.partition("=")
            if path and name in self.served:
                found.append((self.served[name], path))
            elif len(self.served) == 1:
                found.append((next(iter(self.served.values())), text))
            else:
                rule = (
                    f"has {text}, but there are {len(self.served)} models: say of which, as MODEL=PATH, where MODEL is "
                    f"one of {', '.join(self.served)}"
                )
                raise InputError(Fault(flag, rule))
        names = [model.name for model, _ in found]
        if once and len(set(names)) < len(names):
            several = max(names, key=names.count)
            raise InputError(Fault(flag, f"has several files for the model {several}, but may have one"))
        return found

    def _open(self, model: Served) -> None:
        """Load a model, with its weights and all that can be asked for, so that nothing fails later."""
        folder = open_model(model.path)
        if folder is not None and not model.classifier and folder.paths("classifier_path"):
            model.classifier = model.path
        model.examples = _examples(folder)
        pipeline = self._plain[model.name] = self._load(model)
        first = pipeline.stages[0]
        if not pipeline.has_base or first.takes_embeddings or first.reconstructs:
            raise InputError(f"{model.path} is no generator of images from prompts alone: serve a generator")
        model.has_text, model.num_classes = any(stage.reads_text for stage in pipeline.stages), first.num_classes
        model.kinds, model.has_no = tuple(stage.flags for stage in pipeline.stages), first.has_no
        model.size = pipeline.image_size
        model.sampler = first.defaults.sampler.algorithm
        model.steps = first.process(first.defaults).num_timesteps
        model.guidable = model.has_text or model.num_classes > 0
        model.guidance = first.defaults.guidance.scales(model.guidable)[0]
        for stage in pipeline.stages:
            stage.network()
        guides, _ = of_guides([*model.loras.values()])
        if model.classifier:
            classifier = load_guide(model.classifier, self.device, self.precision, loras=Loras.read(guides))
            classifier.check_fits((first.image_size, first.image_size), first.signal, first.tokenizer)
        else:
            check_guided(guides)
        if model.loras or model.controlnet:
            self._load(model, list(model.loras.values()), bool(model.controlnet))

    def _load(self, model: Served, loras: Sequence[str] = (), controlled: bool = False) -> Pipeline:
        return load(
            model.path,
            self.device,
            self.precision,
            upsampler_paths=model.upsamplers,
            keep_loaded=True,
            lora=loras,
            controlnet=model.controlnet if controlled else "",
        )

    def find(self, name: str) -> Served:
        """The model of this name; of an empty name the first. Raises Refusal for another."""
        if not name:
            return next(iter(self.served.values()))
        if name not in self.served:
            known = f"{', '.join(self.served)}{nearest(name, self.served)}"
            raise Refusal(404, f"there is no model {name[:80]!r}, but {known}")
        return self.served[name]

    def pipeline(self, name: str, loras: Sequence[str] = (), controlled: bool = False) -> Pipeline:
        """Of the model, with LoRAs (PATH:FACTOR) and its ControlNet. For one thread."""
        if not loras and not controlled:
            return self._plain[name]
        key = (name, tuple(loras), controlled)
        if key not in self._adapted:
            self._adapted.clear()  # before the next is loaded
            self._adapted[key] = self._load(self.served[name], loras, controlled)
        return self._adapted[key]

    def without_paths(self, sentence: str) -> str:
        """A message for a client: with the models' names in place of where their files are."""
        for model in self.served.values():
            stages = [stage.path for stage in self._plain[model.name].stages] if model.name in self._plain else []
            paths = [*stages, model.path, *model.upsamplers, model.classifier, *model.loras.values(), model.controlnet]
            for path in sorted({p for p in paths if os.sep in p}, key=len, reverse=True):
                sentence = sentence.replace(path, f"{model.name} ({_file_name(path)})")
        return sentence


def _named(given: str) -> tuple[str, str]:
    """NAME=PATH, or a path whose last part, without its ending, is the name."""
    name, equals, path = given.partition("=")
    if equals and name and os.sep not in name:
        return name, path
    return _file_name(given), given


def _examples(folder: ModelFolder | None) -> list[str]:
    """Prompts for a model: of a bundled one those of its demo, of another the one of its card."""
    if folder is None:
        return []
    if folder.name in EXAMPLES and folder == trained_models().get(folder.name):
        return EXAMPLES[folder.name].split("|")
    return [shlex.split(text)[0] for text in re.findall(r"--prompts ('[^'\n]+'|[\w-]+)", folder.card)[:1]]


def _file_name(path: str) -> str:
    return os.path.splitext(os.path.basename(path.rstrip("/")))[0]
