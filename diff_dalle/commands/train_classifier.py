"""Everything that a run training a classifier is set by, and what is built from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..config import option, section
from ..data.loader import DataConfig, Loader
from ..diffusion.diffusion_config import NoiseConfig, create_noise_process
from ..diffusion.resample import ContrastiveConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..errors import InputError
from ..models.noised_clip import NoisedClipConfig
from ..tasks.contrastive import ContrastiveTask
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.loop import TrainingConfig
from ..training.optim import OptimConfig
from ..training.trainee import Trainee
from .training import TrainingRun

WARMUP_FRACTION = 0.02  # of the steps until the rate is 0: CLIP's 2000 of its 100,000-odd, nearly


@dataclass(frozen=True)
class ClassifierData(DataConfig):
    """Data"""

    random_crop: bool = option(True, "cut out a random 80 to 100 % of each image instead of its middle")


@dataclass(frozen=True)
class ClassifierOptim(OptimConfig):
    """Optimizer"""

    weight_decay: float = option(0.1, "decoupled weight decay of matrices and convolutions; never of norms, biases, "
                                      "embeddings and the logit scale")  # fmt: skip
    warmup_steps: int = option(-1, "steps over which the learning rate rises linearly from 0; -1 = 2 % of the steps "
                                   "until it is 0 again")  # fmt: skip
    lr_anneal_steps: int = option(-1, "step at which the annealed learning rate reaches 0; 0 = constant rate, "
                                      "-1 = iterations")  # fmt: skip
    lr_anneal: str = option("cosine", "shape of the annealing", choices=("linear", "cosine"))

    def __post_init__(self):
        for name in ("warmup_steps", "lr_anneal_steps"):
            if getattr(self, name) < -1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 0, or -1")
        if -1 not in (self.warmup_steps, self.lr_anneal_steps):
            super().__post_init__()

    def resolved(self, iterations: int) -> OptimConfig:
        """With every -1 replaced by what it stands for."""
        anneal = iterations if self.lr_anneal_steps == -1 else self.lr_anneal_steps
        warmup = int(WARMUP_FRACTION * anneal) if self.warmup_steps == -1 else self.warmup_steps
        return replace(self, lr_anneal_steps=anneal, warmup_steps=warmup)


@dataclass(frozen=True)
class ClassifierTraining(TrainingConfig):
    """Training"""

    batch_size: int = option(128, "samples per process and step; those of all processes are each other's negatives",
                             free=True)  # fmt: skip
    keep_best: bool = option(True, "keep the weights with the lowest held-out loss as best.pt", free=True)


@dataclass(frozen=True)
class ClassifierRun(TrainingRun):
    """Settings of ``train_classifier.py``; guiding later needs ``model``, ``diffusion``, ``contrastive`` and
    ``tokenizer`` only."""

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
        batch, piece = self.training.batch_size, self.training.microbatch
        if piece and batch % piece:
            raise InputError(f"microbatch is {piece}, but must divide batch_size ({batch}): the contrastive loss "
                             "compares all samples of a batch")  # fmt: skip
        optim = self.optim.resolved(self.training.iterations)
        self.check_annealing(optim)
        object.__setattr__(self, "optim", optim)  # so that checkpoints say what was meant

    @property
    def image_size(self) -> int:
        return self.model.image_size

    @property
    def text_length(self) -> int:
        return self.model.text_length

    def build_trainees(self, tokenizer: Tokenizer, shown: Loader, world: World) -> list[Trainee]:
        process = create_noise_process(self.diffusion)
        task = ContrastiveTask(self.build_model(tokenizer), process, self.contrastive, world)
        return [Trainee(task, self.optim, self.training.precision, world)]

    def check_world(self, world: World) -> None:
        if self.training.batch_size * world.size < 2:
            raise InputError("batch_size is 1, but a contrastive loss needs at least 2 samples: with a single caption "
                             "there is nothing to choose from")  # fmt: skip
