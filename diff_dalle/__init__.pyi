# The public names: what type checkers see, and where __init__.py imports each from at its first use.

from typing import Any

from .batch import Batch as Batch
from .batch import Conditioning as Conditioning
from .checkpoints.model_folder import ModelFolder as ModelFolder
from .checkpoints.model_folder import trained_models as trained_models
from .commands.train import TrainedRun as TrainedRun
from .commands.train import train as train
from .config import InputError as InputError
from .diffusion import SAMPLERS as SAMPLERS
from .diffusion import SCHEDULES as SCHEDULES
from .diffusion import ClassifierGuidance as ClassifierGuidance
from .diffusion import DiffusionConfig as DiffusionConfig
from .diffusion import GaussianDiffusion as GaussianDiffusion
from .diffusion import GuidanceConfig as GuidanceConfig
from .diffusion import LogSnrConfig as LogSnrConfig
from .diffusion import LogSnrProcess as LogSnrProcess
from .diffusion import LossSecondMomentResampler as LossSecondMomentResampler
from .diffusion import LossType as LossType
from .diffusion import ModelMeanType as ModelMeanType
from .diffusion import ModelVarType as ModelVarType
from .diffusion import ScheduleSampler as ScheduleSampler
from .diffusion import SpacedDiffusion as SpacedDiffusion
from .diffusion import Step as Step
from .diffusion import UniformSampler as UniformSampler
from .diffusion import betas_for_alpha_bar as betas_for_alpha_bar
from .diffusion import create_gaussian_diffusion as create_gaussian_diffusion
from .diffusion import create_named_schedule_sampler as create_named_schedule_sampler
from .diffusion import get_named_beta_schedule as get_named_beta_schedule
from .diffusion import space_timesteps as space_timesteps
from .diffusion.editing import EditConfig as EditConfig
from .diffusion.losses import LOSSES as LOSSES
from .diffusion.sampling import SamplerConfig as SamplerConfig
from .images.control_filters.table import FILTERS as FILTERS
from .models.generator import Generator as Generator
from .models.generator import GeneratorConfig as GeneratorConfig
from .models.noised_clip import NoisedClip as NoisedClip
from .models.noised_clip import NoisedClipConfig as NoisedClipConfig
from .recipes.classifier import ClassifierRun as ClassifierRun
from .recipes.generator import GeneratorRun as GeneratorRun
from .sampling.classifier import Classifier as Classifier
from .sampling.classifier import load_classifier as load_classifier
from .sampling.control import Control as Control
from .sampling.pipeline import Pipeline as Pipeline
from .sampling.pipeline import load as load
from .sampling.request import ImageEdit as ImageEdit
from .sampling.request import Request as Request
from .sampling.stage_settings import StageSettings as StageSettings
from .text.tokenizer import Tokenizer as Tokenizer
from .text.tokenizer import load_tokenizer as load_tokenizer
from .training.settings import TASKS as TASKS
from .training.task import Task as Task
from .worlds.table import WORLDS as WORLDS

class _Models:
    """The package diff_dalle.models, which can be called."""

    def __call__(self) -> dict[str, ModelFolder]: ...
    def __getattr__(self, name: str) -> Any: ...

models: _Models
__version__: str
__all__: list[str]
