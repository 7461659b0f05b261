"""Settings of ``evaluate.py`` that evaluators read."""

from __future__ import annotations

from dataclasses import dataclass

from ... import storage
from ...checkpoints.model_folder import open_model
from ...config import given, lookup, option, section
from ...data.captions import caption_option
from ...diffusion.sampling import SamplerConfig
from ...distributed.launch import DistributedConfig
from ...errors import InputError
from ...evaluation.metrics import METRICS
from ...models.precision_names import PRECISIONS
from ...sampling.classifier import ClassifierConfig
from ...sampling.latent_config import LatentCascadeConfig
from ...sampling.lora_config import accept_option, check_accepted, lora_option
from ...sampling.request import UpsamplersConfig
from ..recorded import GivenGuidance
from .image_metrics import IMAGE_METRICS


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation"""

    model_path: str = option(
        "", "checkpoint of a base generator, or of stage C with stage_b; empty = upsamplers only, or a decoder"
    )
    decoder_path: tuple[str, ...] = option(
        (), "checkpoint of a decoder, or one for each of its U-Nets, instead of a generator: its variations are scored"
    )
    lora: tuple[str, ...] = lora_option()
    accept_changed_base: bool = accept_option()
    precision: str = option("auto", "floating-point precision of the networks", choices=PRECISIONS)
    clip_path: str = option(
        "", "checkpoint of the decoder's CLIP; empty = where it was in training", needs=("decoder_path",)
    )
    shapes_dir: str = option("", "folder of the shapes world of the training data: samples are scored by ShapeEval")
    emoji_dir: str = option(
        "", "folder of the emoji world of the training data: samples of what it holds out are scored"
    )
    data_dir: tuple[str, ...] = option(
        (),
        "captioned shards, instead of shapes_dir: samples of their captions are scored by the classifier; empty with "
        "emoji_dir = the emoji that it holds out by name",
    )
    caption_field: str = caption_option()
    num_samples: int = option(256, "captions of data_dir to sample; fewer if it has fewer", needs=("data_dir",))
    labels: tuple[int, ...] = option(
        (),
        "classes for class-conditional generators, used in turn; none = those of the images in data_dir (their cls "
        "members), else uniformly at random, by the seed",
    )
    aspect_ratios: tuple[str, ...] = option(
        ("1/1",),
        "width / height of a latent cascade's samples, such as 1/1,2/1: each is scored by itself, with about as many "
        "pixels as in training",
    )
    progress: str = option("", "progress.csv of the training run, to plot; empty = no plots")
    report_dir: str = option("runs/report", "folder for report.md, scores.json and images")
    prompts_per_task: int = option(64, "captions per ShapeEval task", needs=("shapes_dir",))
    edits: int = option(
        0, "images of the shapes world per kind of edit (inpainting, image to image, variations); 0 = none"
    )
    controlnet: str = option(
        "", "checkpoint of a ControlNet for model_path, which pictures of the shapes world control; empty = none"
    )
    guidance_prompts: int = option(
        0, "captions per guidance setting in the shapes world; 0 = prompts_per_task", needs=("shapes_dir",)
    )
    metrics: tuple[str, ...] = option(
        (),
        f"distances between generated and real images in feature space, of {', '.join(METRICS)}, and "
        f"{', '.join(IMAGE_METRICS)}; none = all of the former with the evaluator feature_metrics, which it asks for",
    )
    feature_network: str = option(
        "",
        "network of these features: inception, inception:FILE with a local file of its weights, or of any installed "
        "package PACKAGE.MODULE:FUNCTION, which returns a network from uint8 [N, 3, H, W] to [N, D]; empty = the "
        "classifier's image tower",
    )
    lpips_weights: str = option(
        "", "local file of AlexNet's weights for LPIPS; empty = that of torch's cache", needs=("metrics", "lpips")
    )
    batch_size: int = option(64, "images per batch and process in the base generator")
    seed: int = option(0, "random seed; image i is a function of seed + i")

    @property
    def captioned(self) -> tuple[str, ...]:
        """Captioned shards, whose samples the classifier scores."""
        return self.data_dir or ((storage.join(self.emoji_dir, "names"),) if self.emoji_dir else ())

    def __post_init__(self):
        for name in self.metrics:
            lookup({**METRICS, **IMAGE_METRICS}, name, "metric")
        if "is" in self.metrics and not self.feature_network:
            raise InputError(
                "the metric is needs the classes of a network: set --feature_network to inception, or to one that "
                "returns logits"
            )
        if bool(self.shapes_dir) == bool(self.captioned):
            raise InputError("evaluation needs captions: set either --shapes_dir or --data_dir, or --emoji_dir")
        if self.edits < 0 or self.edits == 1 or (self.edits and not (self.shapes_dir and self.model_path)):
            raise InputError(
                f"edits is {self.edits}, but must be 0, or at least 2 with a base generator of the shapes world "
                "(--model_path and --shapes_dir)"
            )
        if self.prompts_per_task < 2 or self.guidance_prompts < 0 or self.guidance_prompts == 1:
            raise InputError(
                f"prompts_per_task is {self.prompts_per_task} and guidance_prompts {self.guidance_prompts}, but they "
                "must be at least 2 (the chance level needs captions to swap), or 0 for guidance_prompts"
            )
        check_accepted(self.accept_changed_base, self.lora, self.controlnet)
        if self.num_samples < 2 or self.batch_size < 1:
            raise InputError(
                f"num_samples is {self.num_samples} and batch_size {self.batch_size}, but they must be at least 2 and 1"
            )


@dataclass(frozen=True)
class EvaluateInputs:
    """What is evaluated, on which captions, and how it samples."""

    evaluation: EvaluateConfig = section(EvaluateConfig, was=("what",))
    sampler: SamplerConfig = section(SamplerConfig)
    guidance: GivenGuidance = section(GivenGuidance)
    upsamplers: UpsamplersConfig = section(UpsamplersConfig)
    cascade: LatentCascadeConfig = section(LatentCascadeConfig)
    classifier: ClassifierConfig = section(ClassifierConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    @property
    def upsampler_paths(self) -> tuple[str, ...]:
        """As given, or else those that the model folder ``model_path`` brings."""
        model = open_model(self.evaluation.model_path)
        return self.upsamplers.upsampler_paths or (model.paths("upsampler_paths") if model else ())

    def __post_init__(self):
        model, upsamplers = self.evaluation.model_path, self.upsampler_paths
        if self.guidance.guidance_scale == 1 and self.guidance.guidance_scale_end is not None:
            raise InputError(
                "guidance_scale is 1, no guidance in evaluation, but guidance_scale_end is given: leave one of them out"
            )
        decoder = self.evaluation.decoder_path
        if not model and not upsamplers and not decoder:
            raise InputError("there is nothing to evaluate: set --model_path, --upsampler_paths or --decoder_path")
        if self.cascade.stage_b:
            self._check_cascade()
            return
        if self.cascade != LatentCascadeConfig() or self.evaluation.aspect_ratios != EvaluateConfig.aspect_ratios:
            raise InputError(
                "settings of a latent cascade are given, but no stage B: set --stage_b, --stage_a and --model_path"
            )
        if decoder:
            self._check_decoder()
            return
        if self.upsamplers != UpsamplersConfig() and not upsamplers:
            raise InputError("settings of upsamplers are given, but no upsamplers: set --upsampler_paths")
        if self.classifier.classifier_path and not model:
            raise InputError(
                "--classifier_path is given, but it only scores and guides a base generator: set --model_path"
            )
        scored = self.classifier.classifier_path or self.evaluation.feature_network
        if self.evaluation.captioned and model and not scored:
            given = "--data_dir" if self.evaluation.data_dir else "--emoji_dir"
            raise InputError(
                f"{given} needs --classifier_path or --feature_network: without a shapes world, a network scores the "
                "samples"
            )

    def _check_decoder(self) -> None:
        """A decoder is evaluated alone, and samples as its checkpoint says."""
        if self.evaluation.model_path or self.upsamplers.upsampler_paths:
            raise InputError("--decoder_path, and --model_path or --upsampler_paths: evaluate one of them at a time")
        self._check_recorded("a decoder")

    def _check_cascade(self) -> None:
        """A latent cascade is evaluated alone, and samples as its checkpoints say, but for its own settings."""
        others = self.evaluation.decoder_path or self.upsamplers.upsampler_paths or self.classifier.classifier_path
        if others or not self.evaluation.model_path:
            raise InputError(
                "--stage_b needs stage C as --model_path, and no decoder, upsamplers or classifier: evaluate one of "
                "them at a time"
            )
        self._check_recorded("a latent cascade")

    def _check_recorded(self, what: str) -> None:
        if not self.evaluation.shapes_dir:
            raise InputError(f"{what} is scored on pictures of the shapes world: set --shapes_dir")
        if self.sampler != SamplerConfig() or given(self.guidance).keys() - {"guidance_scale"}:
            raise InputError(
                f"{what} samples as its checkpoint says: leave flags of the sampler and of the guidance out, except "
                "--guidance_scale"
            )
