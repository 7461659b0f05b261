"""Training a CLIP on noised images, which guides sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from ..checkpoints.pixels import ClassifierSettings
from ..config import Fault, InputError, as_flag, named, option, section, settings
from ..config.bounds import MAX_BATCH
from ..data.loader import DataConfig, Loader
from ..data.spec import CaptionSpec, ImageSpec, SampleSpec
from ..diffusion.diffusion_config import NoiseConfig, create_noise_process
from ..diffusion.resample import ContrastiveConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..tasks.contrastive import ContrastiveTask
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.settings import OptimConfig, TrainingConfig, chosen_task
from .recipe import Recipe, Session, without_logdir, wrong_annealing

WARMUP_FRACTION = 0.02  # of the annealing steps; about CLIP's 2,000 of 100,000


@settings
class ClassifierData(DataConfig):
    """Data"""

    random_crop: bool = option(True, "random crop, 80–100 % of the shorter side, instead of a center crop")

    def faults(self) -> Iterator[Fault]:
        if self.aspect.multi_aspect_ratio:
            rule = "is set, but a classifier takes square images only: leave it out"
            yield Fault("aspect.multi_aspect_ratio", rule)
            return  # else random_crop, which is the default here, would be refused too
        yield from super().faults()


@settings
class ClassifierOptim(OptimConfig):
    """Optimizer"""

    weight_decay: float = option(
        0.1,
        "decoupled weight decay of linear and convolution weights; norms, biases, "
        "embeddings and the logit scale are exempt",
        least=0,
        free=True,
    )
    warmup_steps: int = option(
        -1,
        "linear warm-up of the learning rate, in steps; -1 = 2 % of lr_anneal_steps",
        least=0,
        besides=(-1,),
        free=True,
    )
    lr_anneal_steps: int = option(
        -1,
        "step at which the annealed learning rate reaches 0; 0 = constant rate, -1 = iterations",
        least=0,
        besides=(-1,),
        free=True,
    )
    lr_anneal: str = option(
        "cosine",
        "learning-rate schedule of the annealing",
        choices=("linear", "cosine"),
        needs=("lr_anneal_steps",),
        free=True,
    )

    def resolved(self, training: TrainingConfig) -> ClassifierOptim:
        """With every -1 resolved. InputError when the run may end at another step than ``iterations``."""
        anneal = training.iterations if self.lr_anneal_steps == -1 else self.lr_anneal_steps
        if self.lr_anneal_steps == -1 and (training.samples or not training.iterations):
            limit = "samples" if training.samples else "hours"
            rule = f"is -1, the last of the iterations, but {limit} may end the run at another step: set it"
            raise InputError(Fault("lr_anneal_steps", f"{rule}, or {named('iterations')} without {named(limit)}"))
        warmup = int(WARMUP_FRACTION * anneal) if self.warmup_steps == -1 else self.warmup_steps
        return replace(self, lr_anneal_steps=anneal, warmup_steps=warmup)


@settings
class ClassifierTraining(TrainingConfig):
    """Training"""

    batch_size: int = option(
        128, "samples per process and step; all processes share their negatives", free=True, least=1, most=MAX_BATCH
    )
    keep_best: bool = option(
        True, "keep the weights with the lowest held-out loss as best.pt", free=True, needs=("val_data_dir",)
    )


@settings
class ClassifierRun:
    """Settings of ``train_classifier.py``."""

    kind: ClassVar[str] = "classifier"

    data: ClassifierData = section(ClassifierData)
    model: NoisedClipConfig = section(NoisedClipConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: NoiseConfig = section(NoiseConfig)
    contrastive: ContrastiveConfig = section(ContrastiveConfig)
    optim: ClassifierOptim = section(ClassifierOptim)
    training: ClassifierTraining = section(ClassifierTraining)
    tracking: TrackingConfig = section(TrackingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def faults(self) -> Iterator[Fault]:
        yield from wrong_annealing(self.training, self.optim.resolved(self.training))

    def resolved(self) -> ClassifierRun:
        """With every -1 resolved, as dry runs print and checkpoints hold it."""
        optim = self.optim.resolved(self.training)
        return self if optim == self.optim else replace(self, optim=optim)

    def without_place(self, config: dict[str, Any]) -> dict[str, Any]:
        return without_logdir(config)

    def recipe(self, processes: int = 1) -> Recipe:
        run = self.resolved()
        return Recipe(
            run,
            ClassifierSettings.of_run(run),
            run.training,
            {"": run.optim},
            run.data,
            run.tracking,
            run.distributed,
            open_classifier,
            has_text=True,
        )


def _noise_note(diffusion: NoiseConfig) -> str:
    """What the generators have to be like that the classifier is to guide."""
    schedule, flags = diffusion.noise_schedule, ", ".join(map(as_flag, ("noise_schedule", "diffusion_steps")))
    noise = f"the noise of the {schedule} schedule of {diffusion.diffusion_steps:,} steps ({flags})"
    return f"Note: this classifier learns {noise}: the generators that it is to guide should have the same."


def open_classifier(recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
    run: ClassifierRun = recipe.settings
    if run.training.batch_size * world.size < 2:
        rule = "is 1, but a contrastive loss needs at least 2 samples: it compares each image with at least one"
        raise InputError(Fault("batch_size", f"{rule} other caption"))
    tokenizer = tokenizer or recipe.tokenizer()
    assert tokenizer is not None  # classifiers always read text
    if run.contrastive.noised:
        world.print(_noise_note(run.diffusion))
    image = ImageSpec((run.model.image_size, run.model.image_size))
    spec = SampleSpec(image, (CaptionSpec(tokenizer, run.model.text_length),))

    def task(model: NoisedClip, name: str, shown: Loader) -> ContrastiveTask:
        contrastive = chosen_task(run.training.task, ContrastiveTask)
        return contrastive(model, create_noise_process(run.diffusion), run.contrastive, world)

    return Session(recipe, world, spec, task, tokenizer)
