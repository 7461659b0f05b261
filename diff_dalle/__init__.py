"""Text-to-image diffusion models, trained from scratch.

``diff_dalle.load("ema.pt").sample(["a red circle"])`` generates images from a checkpoint, or from a model that comes
along, by its name (``diff_dalle.models()``). The diffusion process and its
enumerations have Guided-Diffusion's names and numbers. Names are imported when they are first used.
"""

from importlib import import_module

_HOMES = {
    "sampling.pipeline": ("Pipeline", "load"),
    "sampling.request": ("ImageEdit", "Request"),
    "sampling.stage_settings": ("StageSettings",),
    "sampling.classifier": ("Classifier", "load_classifier"),
    "sampling.control": ("Control",),
    "checkpoints.model_folder": ("trained_models",),
    "config": ("InputError",),
    "batch": ("Batch", "Conditioning"),
    "models.generator": ("Generator", "GeneratorConfig"),
    "models.noised_clip": ("NoisedClip", "NoisedClipConfig"),
    "text.tokenizer": ("Tokenizer", "load_tokenizer"),
    "training.task": ("Task",),
    "diffusion": (
        "SAMPLERS", "SCHEDULES", "ClassifierGuidance", "DiffusionConfig", "GaussianDiffusion", "GuidanceConfig",
        "LogSnrConfig", "LogSnrProcess", "LossSecondMomentResampler", "LossType", "ModelMeanType", "ModelVarType",
        "ScheduleSampler", "SpacedDiffusion",
        "UniformSampler", "betas_for_alpha_bar", "create_gaussian_diffusion", "create_named_schedule_sampler",
        "get_named_beta_schedule", "space_timesteps",
    ),
    "diffusion.editing": ("EditConfig",),
    "diffusion.sampling": ("SamplerConfig",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name == "models":  # a package that can be called
        return import_module(".models", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'diff_dalle' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
