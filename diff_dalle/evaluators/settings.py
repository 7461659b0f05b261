"""Settings of ``evaluate.py`` that evaluators read."""

from __future__ import annotations

from collections.abc import Iterator

from .. import storage
from ..checkpoints.model_folder import open_model
from ..config import Fault, given, named, option, section, settings
from ..config.bounds import MAX_BATCH, MAX_SEED, MAX_TEXTS
from ..data.captions import caption_option
from ..diffusion.sampling import SamplerConfig
from ..distributed.launch import DistributedConfig
from ..evaluation.metrics import METRICS
from ..models.options import PRECISIONS
from ..sampling.classifier import ClassifierConfig
from ..sampling.lora_config import accept_option, check_accepted, lora_option
from ..sampling.stage_settings import GivenGuidance, LatentCascadeConfig, UpsamplersConfig

IMAGE_METRICS = ("is", "lpips")  # metrics that have networks of their own, instead of one whose features are compared


@settings
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
    judge_path: str = option(
        "",
        "checkpoint of a noised CLIP that names emoji in samples, possibly trained on held-out ones; empty = the "
        "classifier",
        needs=("emoji_dir",),
    )
    data_dir: tuple[str, ...] = option(
        (),
        "captioned shards, instead of shapes_dir: samples of their captions are scored by the classifier; empty with "
        "emoji_dir = its emoji held out by name",
    )
    caption_field: str = caption_option()
    num_samples: int = option(
        256, "captions of data_dir to sample; fewer if it has fewer", needs=("data_dir",), least=2, most=MAX_BATCH
    )
    training_dir: tuple[str, ...] = option(
        (),
        "shards of the base's training: the most similar picture in them is found for each sample of the captions of "
        "data_dir, and for the pictures of data_dir, which the base should not have seen",
    )
    labels: tuple[int, ...] = option(
        (),
        "classes for class-conditional generators, used in turn; none = those of the images in data_dir (their cls "
        "members), else uniformly at random, by the seed",
        longest=MAX_TEXTS,
    )
    aspect_ratios: tuple[str, ...] = option(
        ("1/1",),
        "width / height of a latent cascade's samples, such as 1/1,2/1: each is scored separately, at about the "
        "training area",
    )
    progress: str = option("", "progress.csv of the training run, to plot; empty = no plots")
    report_dir: str = option("runs/report", "folder for report.md, scores.json and images")
    prompts_per_task: int = option(64, "captions per ShapeEval task", needs=("shapes_dir",), least=2, most=MAX_BATCH)
    edits: int = option(
        0,
        "images of the shapes world per kind of edit (inpainting, image to image, variations); 0 = none",
        least=0,
        most=MAX_BATCH,
    )
    controlnet: str = option(
        "", "ControlNet checkpoint for model_path, controlled by pictures of the shapes world; empty = none"
    )
    guidance_prompts: int = option(
        0,
        "captions per guidance setting in the shapes world; 0 = prompts_per_task",
        needs=("shapes_dir",),
        least=0,
        most=MAX_BATCH,
    )
    metrics: tuple[str, ...] = option(
        (),
        f"distances between generated and real images in feature space, of {', '.join(METRICS)}, and "
        f"{', '.join(IMAGE_METRICS)}; none = all of the former with the evaluator feature_metrics, which it selects",
        choices=(*METRICS, *IMAGE_METRICS),
    )
    feature_network: str = option(
        "",
        "network of these features: inception, inception:FILE with a local file of its weights, or an installed "
        "package's PACKAGE.MODULE:FUNCTION, which returns a network from uint8 [N, 3, H, W] to [N, D]; empty = the "
        "classifier's image tower",
    )
    lpips_weights: str = option(
        "", "local file of AlexNet's weights for LPIPS; empty = from torch's cache", needs=("metrics", "lpips")
    )
    batch_size: int = option(64, "images per batch and process in the base generator", least=1, most=MAX_BATCH)
    seed: int = option(0, "random seed; image i is a function of seed + i", most=MAX_SEED)

    @property
    def captioned(self) -> tuple[str, ...]:
        """Captioned shards, whose samples the classifier scores."""
        return self.data_dir or ((storage.join(self.emoji_dir, "names"),) if self.emoji_dir else ())

    def faults(self) -> Iterator[Fault]:
        if "is" in self.metrics and not self.feature_network:
            needed = f"set {named('feature_network')} to inception, or to one that returns logits"
            yield Fault("metrics", f"has is, which needs the classes of a network: {needed}")
        if bool(self.shapes_dir) == bool(self.captioned):
            flags = f"{named('shapes_dir')} or {named('data_dir')}, or {named('emoji_dir')}"
            yield Fault("", f"evaluation needs captions: set either {flags}")
        if self.edits == 1 or (self.edits and not (self.shapes_dir and self.model_path)):
            needed = f"{named('model_path')} and {named('shapes_dir')}"
            rule = f"must be 0, or at least 2 with a base generator of the shapes world ({needed})"
            yield Fault.of(self, "edits", rule)
        if self.guidance_prompts == 1:
            yield Fault.of(self, "guidance_prompts", "must be at least 2, since the chance level swaps captions, or 0")
        check_accepted(self.accept_changed_base, self.lora, self.controlnet)


@settings
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

    def faults(self) -> Iterator[Fault]:
        model, upsamplers, decoder = self.evaluation.model_path, self.upsampler_paths, self.evaluation.decoder_path
        model_flag, upsamplers_flag, decoder_flag = map(named, ("model_path", "upsampler_paths", "decoder_path"))
        if self.guidance.guidance_scale == 1 and self.guidance.guidance_scale_end is not None:
            other = named("guidance_scale_end")
            yield Fault(
                "guidance_scale", f"is 1, no guidance in evaluation, but {other} is given: leave one of them out"
            )
        if not model and not upsamplers and not decoder:
            yield Fault("", f"there is nothing to evaluate: set {model_flag}, {upsamplers_flag} or {decoder_flag}")
        if self.cascade.stage_b:
            others = decoder or self.upsamplers.upsampler_paths or self.classifier.classifier_path
            if others or not model:
                rule = f"needs stage C as {model_flag}, and no decoder, upsamplers or classifier"
                yield Fault("cascade.stage_b", f"{rule}: evaluate one of them at a time")
            yield from self._recorded("a latent cascade")
            return
        if self.cascade != LatentCascadeConfig() or self.evaluation.aspect_ratios != EvaluateConfig.aspect_ratios:
            flags = f"{named('stage_b')}, {named('stage_a')} and {model_flag}"
            yield Fault("", f"settings of a latent cascade are given, but no stage B: set {flags}")
        if self.classifier.classifier_path and not model:
            remedy = "leave it out" if decoder else f"set {model_flag}"
            rule = f"is given, but it only scores and guides a base generator: {remedy}"
            yield Fault("classifier.classifier_path", rule)
        if decoder:
            if model or self.upsamplers.upsampler_paths:
                rule = f"and {model_flag} or {upsamplers_flag} exclude each other: evaluate one of them at a time"
                yield Fault("evaluation.decoder_path", rule)
            yield from self._recorded("a decoder", bool(self.evaluation.data_dir and self.evaluation.feature_network))
            return
        if self.upsamplers != UpsamplersConfig() and not upsamplers:
            yield Fault("", f"settings of upsamplers are given, but no upsamplers: set {upsamplers_flag}")
        evaluation = self.evaluation
        scored = self.classifier.classifier_path or evaluation.feature_network or evaluation.judge_path
        if evaluation.captioned and model and not (scored or evaluation.training_dir):
            *names, last = ["feature_network", "training_dir"] if evaluation.data_dir else ["judge_path"]
            needed = f"{', '.join(map(named, ['classifier_path', *names]))} or {named(last)}"
            rule = f"needs {needed}: without a shapes world, a network or training pictures score the samples"
            yield Fault(f"evaluation.{'data_dir' if evaluation.data_dir else 'emoji_dir'}", rule)

    def _recorded(self, what: str, has_features: bool = False) -> Iterator[Fault]:
        """What samples as its checkpoints say, but for its own settings. has_features: its samples are compared with
        other pictures by a network."""
        if not (self.evaluation.shapes_dir or has_features):
            others = f", or {named('data_dir')}, {named('metrics')} and {named('feature_network')}"
            is_decoder = bool(self.evaluation.decoder_path)
            remedy = f"set {named('shapes_dir')}{others if is_decoder else ''}"
            yield Fault("", f"{what} is scored on pictures of the shapes world: {remedy}")
        if self.sampler != SamplerConfig() or given(self.guidance).keys() - {"guidance_scale"}:
            rest = f"leave flags of the sampler and of the guidance out, except {named('guidance_scale')}"
            yield Fault("", f"{what} samples as its checkpoint says: {rest}")
