"""Settings of ``train_classifier.py``, and the trainee built from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

from ..config import option, section
from ..data.loader import DataConfig, Loader
from ..diffusion.diffusion_config import NoiseConfig, create_noise_process
from ..diffusion.resample import ContrastiveConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..errors import InputError
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..tasks.contrastive import ContrastiveTask
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.optim_config import OptimConfig
from ..training.settings import TrainingConfig
from ..training.trainee import Trainee
from .training import TrainingRun

WARMUP_FRACTION = 0.02  # of the annealing steps; about CLIP's 2,000 of 100,000


@dataclass(frozen=True)
class ClassifierData(DataConfig):
    """Data"""

    random_crop: bool = option(True, "random crop, 80–100 % of the shorter side, instead of a center crop")

    def __post_init__(self):
        if self.aspect.multi_aspect_ratio:
            raise InputError("multi_aspect_ratio is set, but a classifier takes square images only: leave it out")
        super().__post_init__()


@dataclass(frozen=True)
class ClassifierOptim(OptimConfig):
    """Optimizer"""

    weight_decay: float = option(
        0.1,
        "decoupled weight decay of linear and convolution weights; norms, biases, "
        "embeddings and the logit scale are exempt",
    )
    warmup_steps: int = option(-1, "linear warm-up of the learning rate, in steps; -1 = 2 % of lr_anneal_steps")
    lr_anneal_steps: int = option(
        -1, "step at which the annealed learning rate reaches 0; 0 = constant rate, -1 = iterations"
    )
    lr_anneal: str = option(
        "cosine",
        "learning-rate schedule of the annealing",
        choices=("linear", "cosine"),
        needs=("lr_anneal_steps",),
    )

    def __post_init__(self):
        for name in ("warmup_steps", "lr_anneal_steps"):
            if getattr(self, name) < -1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 0, or -1")
        if -1 not in (self.warmup_steps, self.lr_anneal_steps):
            super().__post_init__()

    def resolved(self, training: TrainingConfig) -> OptimConfig:
        """With every -1 resolved. InputError when the run may end at another step than ``iterations``."""
        anneal = training.iterations if self.lr_anneal_steps == -1 else self.lr_anneal_steps
        if self.lr_anneal_steps == -1 and (training.samples or not training.iterations):
            limit = "samples" if training.samples else "hours"
            raise InputError(
                f"lr_anneal_steps is -1, the last of the iterations, but {limit} may end the run at another step: set "
                f"--lr_anneal_steps, or --iterations without --{limit}"
            )
        warmup = int(WARMUP_FRACTION * anneal) if self.warmup_steps == -1 else self.warmup_steps
        return replace(self, lr_anneal_steps=anneal, warmup_steps=warmup)


@dataclass(frozen=True)
class ClassifierTraining(TrainingConfig):
    """Training"""

    batch_size: int = option(128, "samples per process and step; all processes share their negatives", free=True)
    keep_best: bool = option(
        True, "keep the weights with the lowest held-out loss as best.pt", free=True, needs=("val_data_dir",)
    )


@dataclass(frozen=True)
class ClassifierRun(TrainingRun):
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

    def __post_init__(self):
        optim = self.optim.resolved(self.training)
        self.check_annealing(optim)
        object.__setattr__(self, "optim", optim)  # checkpoints hold the resolved values

    @property
    def image_size(self) -> int:
        return self.model.image_size

    @property
    def text_length(self) -> int:
        return self.model.text_length

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        model = cast(NoisedClip, self.build_model(tokenizer, world))
        task = ContrastiveTask(model, create_noise_process(self.diffusion), self.contrastive, world)
        return [Trainee(task, self.optim, self.training.precision, world)]

    def check_world(self, world: World) -> None:
        if self.training.batch_size * world.size < 2:
            raise InputError(
                "batch_size is 1, but a contrastive loss needs at least 2 samples: it compares each image "
                "with at least one other caption"
            )
