"""Training a LoRA: low-rank changes of the weights of a trained network, and new tokens, while the network stays as it
is. A run of any kind of network becomes one of its LoRA with ``LoraRun`` as its first base class."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, BinaryIO, ClassVar

import torch
from torch import nn

from ... import storage
from ...checkpoints.checkpoint import load_file
from ...checkpoints.kinds import find_kind
from ...checkpoints.loading import SavedNetwork, open_networks
from ...checkpoints.lora_file import ENDING, LoraAbout, base_of, read_lora, write_lora
from ...config import Section, differences, faults_of, members, option, settings
from ...data.loader import DataConfig, Loader
from ...data.mixed import MixedLoader
from ...distributed.world import World
from ...embeddings.contract import weights_digest
from ...errors import Fault, InputError, named
from ...models.adapters.adapted import Adapted
from ...models.compiling import compile_training
from ...tasks.imitation import Imitation
from ...text.tokenizer import Tokenizer
from ...text.trained_tokens import TokenSpec, find_tokens, parse_token, tokens_option
from ...training.saving import FilesWithWeights
from ...training.trainee import Trainee
from ..training import TrainingRun, overlaid

# How the names of settings of a diffusion process begin that concern training alone, and may differ from the base's.
TRAINING_ONLY = ("loss_", "p2_", "min_snr_", "sigmoid_", "vb_", "offset_noise", "pyramid_noise")
TASK_SECTIONS = ("denoising",)  # as the base's training had them, unless told otherwise


@settings
class LoraRun(TrainingRun):
    """What every run that trains a LoRA is set by.

    ``bases`` of the instance that ``settled`` returns: the networks that are adapted, by name, with their weights.
    """

    bases: ClassVar[Mapping[str, nn.Module]] = {}
    outside: ClassVar[nn.Parameter | None] = None  # what is trained of the tokens of a CLIP that encodes its text
    base_setting: ClassVar[str] = "model_path"

    module_filters: tuple[str, ...] = option(
        ("att",),  # attention and attn
        "which layers are adapted: linear layers and convolutions with one of these texts in their dotted names; none "
        "= train tokens alone",
    )
    rank: int = option(4, "rank of the changes", least=1)
    alpha: float = option(4.0, "the change of a weight is alpha / rank times up times down", above=0)
    train_tokens: tuple[str, ...] = tokens_option()
    lora_checkpoint_path: str | None = option(
        None, "LoRA file with the same modules, rank and tokens to start from; none = no change at first", free=True
    )
    prior_data_dir: tuple[str, ...] = option(
        (),
        "shards of regularization images, as data_dir, which keep what the base knows: half of every batch; none = no "
        "such images",
        free=True,
    )
    prior_weight: float = option(1.0, "weight of the loss of regularization images", needs=("prior_data_dir",), least=0)
    prior_target: str = option(
        "images",
        "what the network learns of regularization images: to predict them, or what the base predicts of them at the "
        "same noise, as of all images whose caption is dropped",
        choices=("images", "base"),
        needs=("prior_data_dir",),
    )
    base_weights: tuple[str, ...] = option(
        (),
        "identity that the base's weights must have, or NAME=IDENTITY for each of several networks; training records "
        "it, none = any",
    )
    accept_changed_base: bool = option(
        False, "start from a LoRA that was trained for another base", free=True, needs=("lora_checkpoint_path",)
    )

    # ------------------------------------------------------------------------------------------- settings of the base

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a file with those of the base, as its checkpoint says them. InputError for others."""
        complete = getattr(super(), "completed", None)
        completed = complete(tree) if complete else overlaid(tree, {})
        path = completed.get(cls.base_setting)
        if not isinstance(path, str) or not path or not storage.exists(path):
            return completed  # ``settled`` refuses it
        kind = cls.kind.removesuffix(ENDING)
        open_networks(path, (kind,))  # an InputError for anything else
        said = load_file(path)["config"]
        for name, member in members(find_kind(kind)).items():
            assert isinstance(member, Section)  # of a kind's settings
            own = completed.get(name, {})
            if isinstance(own, Mapping):
                of_base = {**said.get(name, {})}
                completed[name] = merged = overlaid(of_base, own)
                training = {key: value for key, value in own.items() if str(key).startswith(TRAINING_ONLY)}
                plain = overlaid(of_base, training)
                if changed := differences(plain, merged, member.config):
                    size = ", and model_version, which stands for some" if tree.get("model_version") else ""
                    others = f"but {named(name)} says others: {', '.join(changed)}; leave these out{size}"
                    raise InputError(Fault(cls.base_setting, f"{path} says its settings itself, {others}"))
        for name in TASK_SECTIONS:
            if name in said and name in members(cls) and isinstance(completed.get(name, {}), Mapping):
                completed[name] = overlaid(said[name], completed.get(name, {}))
        return completed

    def faults(self) -> Iterator[Fault]:
        if not self.module_filters and not self.train_tokens:
            rule = f"and {named('train_tokens')} are both empty, so there is nothing to train: set one"
            yield Fault("module_filters", rule)
        yield from faults_of(lambda: self.specs, "train_tokens")
        yield from super().faults()
        if self.training.sharding.parallel != "ddp":
            rule = f"is {self.training.sharding.parallel}, but the base of a LoRA is on every process as a whole"
            yield Fault("parallel", f"{rule}: leave it out")
        if self.prior_data_dir:
            yield from self.wrong_halves(self.training.batch_size)
            if self.data_config.aspect.multi_aspect_ratio:
                other = named("multi_aspect_ratio")
                yield Fault("prior_data_dir", f"and {other} exclude each other: leave one of them out")

    def wrong_halves(self, batch_size: int, processes: int = 1) -> Iterator[Fault]:
        """A batch of whose share on each process half cannot be regularization images."""
        if batch_size % (2 * processes):
            rule = "be even" if processes == 1 else f"be a multiple of {2 * processes}, twice the processes,"
            halves = "half of each batch are regularization images"
            yield Fault("batch_size", f"must {rule} with {named('prior_data_dir')}: {halves}", batch_size)

    @property
    @abstractmethod
    def base_path(self) -> str:
        """The checkpoint of the base; "" = not given."""

    @property
    def network_kind(self) -> str:
        return self.kind.removesuffix(ENDING)

    # ----------------------------------------------------------------------------------------------------- the networks

    @functools.cached_property
    def _saved(self) -> dict[str, SavedNetwork]:
        """What the base's checkpoint says of its networks, by name."""
        if not self.base_path:
            raise InputError(Fault(self.base_setting, "is required: the checkpoint of the network to adapt"))
        found = open_networks(self.base_path, (self.network_kind,))
        return {saved.trainee: saved for saved in found}

    def adapted_names(self) -> tuple[str, ...]:
        """The names of the networks that are adapted."""
        return ("",)

    def settled(self, world: World) -> Any:
        run, bases, weights = super().settled(world), {}, []
        for name in self.adapted_names():
            if name not in self._saved:
                raise InputError(f"{self.base_path} does not hold {name}, which is to be trained: give a file with it")
            bases[name] = self._saved[name].load(world.device)
            weights.append((f"{name}=" if name else "") + weights_digest(bases[name].state_dict()))
        if self.base_weights and self.base_weights != tuple(weights):
            said = f"but {named('base_weights')} says {', '.join(self.base_weights)}: give the checkpoint with these"
            rule = f"{self.base_path} has the weights {', '.join(weights)}, {said}"
            raise InputError(Fault(self.base_setting, rule))
        return run.holding(base_weights=tuple(weights), bases=bases)

    def build_tokenizer(self) -> Tokenizer | None:
        base = next(iter(self._saved.values())).tokenizer
        return find_tokens(base, self.specs).tokenizer if base and self.specs else base

    @property
    def specs(self) -> list[TokenSpec]:
        """``train_tokens``."""
        return [parse_token(entry) for entry in self.train_tokens]

    def build_model(self, tokenizer: Tokenizer | None, world: World | None = None, trainee: str = "") -> nn.Module:
        base = self._saved[trainee].tokenizer
        if self.train_tokens and base is None and self.outside is None:
            raise InputError(Fault("train_tokens", "is set, but the network reads no text: leave it out"))
        tokens = find_tokens(base, self.specs) if base and self.specs else None
        torch.manual_seed(self.training.seed)
        model = Adapted(self.bases[trainee], self.module_filters, self.rank, self.alpha, tokens, self.outside)
        if self.lora_checkpoint_path:
            self._start_from(model, self.lora_checkpoint_path, trainee)
        if self.training.compile:
            compile_training(model)
        return model

    def _start_from(self, model: Adapted, path: str, trainee: str) -> None:
        lora, own = read_lora(path), self.about(trainee)
        expected = replace(own, base=lora.about.base) if self.accept_changed_base else own
        if lora.about != expected:
            differing = [name for name, value in vars(expected).items() if getattr(lora.about, name) != value]
            accept = f", or accept the other base by {named('accept_changed_base')} True"
            hint = accept if differing == ["base"] else ""
            rule = f"{path} has another {' and '.join(differing)} than this run: give one trained with the same{hint}"
            raise InputError(Fault("lora_checkpoint_path", rule))
        model.load_state_dict({f"lora.{name}": value for name, value in lora.tensors.items()})

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        trainees = super().build_trainees(tokenizer, shown, world)  # type: ignore[safe-super]
        if self.prior_target == "base":
            for trainee in trainees:
                half = self.training.batch_size // 2 * world.size
                trainee.task.imitation = Imitation(trainee.task.model, half)  # type: ignore[assignment,arg-type]
                trainee.task.captured = False  # its targets come from outside of the graph
        return trainees

    # ------------------------------------------------------------------------------------------------- data and results

    def _loader(self, config: DataConfig, tokenizer: Tokenizer | None, world: World, **options: Any) -> Any:
        if not self.prior_data_dir or not options.get("shuffle"):
            return super()._loader(config, tokenizer, world, **options)
        options["batch_size"] = self.training.batch_size // 2
        own = super()._loader(config, tokenizer, world, **options)
        options |= {"sources": self.prior_data_dir, "flag": named("prior_data_dir")}
        return MixedLoader(own, super()._loader(config, tokenizer, world, **options), self.prior_weight)

    def about(self, trainee: str) -> LoraAbout:
        """What the LoRA of a network says about itself."""
        base, own = base_of(self.base_weights, trainee), (self.module_filters, self.train_tokens, self.token_clip)
        return LoraAbout(self.network_kind, trainee, base, self.rank, self.alpha, *own)

    @property
    def token_clip(self) -> str:
        """Identity of the CLIP that ``train_tokens`` belong to; "" = to the network."""
        return ""

    def exports(self, trainee: Trainee, files: FilesWithWeights) -> dict[str, Callable[[BinaryIO], object]]:
        """The LoRA file, of the weights as they are evaluated."""
        state = files[trainee.evaluated_role]["state"]
        tensors = {name.removeprefix("lora."): value for name, value in state.items()}
        return {"lora.safetensors": lambda file: write_lora(file, self.about(trainee.name), tensors)}
