"""The ``decoder`` section: a cascade of U-Nets that turns an image embedding into a picture (Ramesh et al. 2022)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from ..config import Fault, InputError, lookup, members, named, option, quantity, settings, spelled
from ..config.bounds import MAX_KERNEL, MAX_SIDE, MAX_STEPS, MAX_WIDTH
from ..diffusion.augmentation import Degradation
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..diffusion.schedules import SCHEDULES, get_named_beta_schedule
from ..models.decoder.config import DecoderUnetConfig
from .decoder_stage import DecoderStage

LOSSES = {"l1": "l1", "l2": "rescaled_mse", "huber": "huber"}  # their names in ``DiffusionConfig``
_OWN_NAMES = {"diffusion_steps": "timesteps", "noise_schedule": "beta_schedule"}  # of settings of a process
CLIPS = ("openai", "open_clip", "diff_dalle")
CLIP_OUTPUTS = ("unit", "released")
_FOR_EACH = "; one for all U-Nets or one for each"
_FOR_UPSAMPLERS = "; one for all upsamplers, one for each, or one for each U-Net, the first of them {}"
#: Settings that can be lists, but that the first U-Net has not.
PER_UPSAMPLER = ("random_crop_sizes", "use_noise_for_lowres_cond", "use_blur_for_lowres_cond")


@settings
class ClipConfig:
    """CLIP that makes the embeddings"""

    refused: ClassVar[dict[str, str]] = {
        "base_model_kwargs": "describes a CLIP with random weights, whose embeddings mean nothing: give a trained model"
    }
    idle: ClassVar[dict[str, tuple]] = {"base_model_kwargs": (None, {})}

    make: str = option("openai", "its maker; openai = open_clip's copy of OpenAI's weights", choices=CLIPS)
    model: str = option("ViT-L/14", "its name there; diff_dalle: path of a train_classifier.py checkpoint")

    identity: str = option("", "identity of its weights, recorded by training; empty = not known")
    outputs: str = option(
        "unit",
        "outputs to use: unit = embeddings of norm 1 and token states after the last norm, zeros at padding; "
        "released = embeddings as projected and states before that norm, also at padding, as in the released stages "
        "of the latent cascade",
        choices=CLIP_OUTPUTS,
    )

    def __str__(self) -> str:
        return f"{self.make} {self.model}" + (f" ({self.identity})" if self.identity else "")

    def is_same(self, other: ClipConfig) -> bool:
        """Whether both are the same CLIP, as far as is known."""
        if self.identity and other.identity:
            return self.identity == other.identity
        return (self.make, self.model, self.outputs) == (other.make, other.model, other.outputs)


@settings
class DecoderConfig:
    """Decoder"""

    refused: ClassVar[dict[str, str]] = {
        "auto_normalize_img": "is decided here, where images are always read into [-1, 1]",
        "vae": "is not supported: these decoders work on pixels",
        "predict_x_start_for_latent_diffusion": "is for latents, but these decoders work on pixels",
        "clip_adapter_overrides": "is not supported",
    }
    idle: ClassVar[dict[str, tuple]] = {
        "auto_normalize_img": (True,),
        "vae": ([], None),
        "predict_x_start_for_latent_diffusion": (False,),
        "clip_adapter_overrides": ({}, None),
    }

    unets: tuple[DecoderUnetConfig, ...] = option(
        (), "U-Nets, from the lowest resolution to the highest", required=True
    )
    image_sizes: tuple[int, ...] = option(
        (),
        "width and height in pixels of each U-Net's images, each a multiple of the one before",
        least=1,
        most=MAX_SIDE,
    )
    image_size: int | None = option(
        None,
        "width and height for a single U-Net, in place of image_sizes; unused if image_sizes is given",
        most=MAX_SIDE,
    )
    channels: int = option(3, "image channels of all U-Nets: 3 = RGB, 1 = grayscale", most=MAX_WIDTH)
    timesteps: int = option(1000, "number of noising steps T in training", least=1, most=MAX_STEPS)
    sample_timesteps: tuple[int | None, ...] = option(
        (None,),
        f"sampling steps: fewer than timesteps = ddim, none = all steps, ancestral{_FOR_EACH}",
        free=True,
        most=MAX_STEPS,
    )
    loss_type: tuple[str, ...] = option(("l2",), f"loss: {', '.join(LOSSES)}{_FOR_EACH}", tuple(LOSSES))
    beta_schedule: tuple[str, ...] | None = option(
        ("cosine",),
        f"noise schedule: {', '.join(SCHEDULES)}{_FOR_EACH}; none = cosine, but linear for the last of several",
        tuple(SCHEDULES),
    )
    learned_variance: tuple[bool, ...] = option((True,), f"learn the variance of a sampling step{_FOR_EACH}")
    clip: ClipConfig | None = option(None, "CLIP that computes embeddings missing from the data")
    image_cond_drop_prob: float = option(
        0.1, "probability of dropping the image embedding in training", least=0, most=1
    )
    text_cond_drop_prob: float = option(
        0.5, "probability of dropping the text in training, independent of the image's", least=0, most=1
    )
    predict_x_start: tuple[bool, ...] = option((False,), f"predict the image instead of the noise{_FOR_EACH}")
    predict_v: tuple[bool, ...] = option((False,), f"predict v; wins over predict_x_start{_FOR_EACH}")
    random_crop_sizes: tuple[int | None, ...] = option(
        (None,),
        "width and height in pixels of random training crops, none = whole images" + _FOR_UPSAMPLERS.format("none"),
        most=MAX_SIDE,
    )
    use_noise_for_lowres_cond: tuple[bool, ...] = option(
        (False,), "noise low-resolution images in training, all levels" + _FOR_UPSAMPLERS.format("False")
    )
    use_blur_for_lowres_cond: tuple[bool, ...] = option(
        (True,), "blur low-resolution images in training" + _FOR_UPSAMPLERS.format("False")
    )
    lowres_downsample_first: bool = option(
        True, "make low-resolution images at the U-Net before's size; False = at the U-Net's own"
    )
    blur_prob: float = option(0.5, "probability of the blur of a low-resolution image", least=0, most=1)
    blur_sigma: tuple[float, ...] = option((0.6,), "standard deviation of the blur in pixels, or LOW,HIGH")
    blur_kernel_size: tuple[int, ...] = option(
        (3,), "width of the blur kernel in pixels, odd, or LOW,HIGH", most=MAX_KERNEL
    )
    lowres_noise_sample_level: float = option(
        0.2,
        "noise level of low-resolution images in sampling, 0–1, as a fraction of a linear schedule",
        least=0,
        most=1,
        free=True,
    )
    learned_variance_constrain_frac: bool = option(
        False, "keep a learned variance between the two fixed ones, by a sigmoid of its fraction"
    )
    vb_loss_weight: float = option(
        0.001,
        "weight of the variational term of a learned variance, in bits per dimension of one step; Nichol & Dhariwal "
        "2021 = timesteps / 1000",
        least=0,
    )
    unconditional: bool = option(False, "no U-Net is conditioned on an image embedding")
    use_dynamic_thres: bool = option(False, "dynamic thresholding in sampling, instead of clipping", free=True)
    dynamic_thres_percentile: float = option(
        0.95, "its percentile of |x_start|, as a fraction", above=0, most=1, free=True
    )
    p2_loss_weight_gamma: tuple[float, ...] = option(
        (0.0,), f"gamma in the weight 1 / (k + SNR)^gamma of the eps loss; 0 = off{_FOR_EACH}", least=0
    )
    p2_loss_weight_k: float = option(1.0, "k in that weight", above=0)
    ddim_sampling_eta: float = option(
        0.0, "randomness of ddim; 0 = deterministic, 1 = as random as ancestral", least=0, free=True
    )
    clip_denoised: bool = option(True, "clip the predicted image to the valid range in sampling", free=True)
    clip_x_start: bool = option(True, "False = the same as clip_denoised False", free=True)

    def __len__(self) -> int:
        return len(self.unets)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width and height in pixels of each U-Net's images."""
        return self.image_sizes or (() if self.image_size is None else (self.image_size,))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the U-Nets, as trainees and in files."""
        return tuple(f"unet{i}" for i in range(len(self)))

    def lists(self) -> dict[str, tuple | None]:
        """The settings that can be lists with a value for each U-Net."""
        return {
            "sample_timesteps": self.sample_timesteps,
            "loss_type": self.loss_type,
            "beta_schedule": self.beta_schedule,
            "learned_variance": self.learned_variance,
            "predict_x_start": self.predict_x_start,
            "predict_v": self.predict_v,
            "p2_loss_weight_gamma": self.p2_loss_weight_gamma,
            "random_crop_sizes": self.random_crop_sizes,
            "use_noise_for_lowres_cond": self.use_noise_for_lowres_cond,
            "use_blur_for_lowres_cond": self.use_blur_for_lowres_cond,
        }

    def own(self, i: int) -> dict[str, Any]:
        """The values of ``lists`` for U-Net ``i``; None for what the first has not."""
        found: dict[str, Any] = {}
        for name, values in self.lists().items():
            if values is None:  # beta_schedule
                values = ("linear" if 0 < i == len(self) - 1 else "cosine",)
            if name in PER_UPSAMPLER and len(values) == len(self) - 1:
                values = (None, *values)
            found[name] = None if i == 0 and name in PER_UPSAMPLER else values[i if len(values) > 1 else 0]
        return found

    def stage(self, i: int) -> DecoderStage:
        """The settings of U-Net ``i``."""
        own, unet = self.own(i), replace(self.unets[i], channels=self.channels)
        steps, gamma, noised = own["sample_timesteps"], own["p2_loss_weight_gamma"], own["use_noise_for_lowres_cond"]
        embedding = i == 0 if unet.cond_on_image_embeds is None else unet.cond_on_image_embeds
        return DecoderStage(
            name=self.names[i],
            unet=unet,
            image_size=self.sizes[i],
            small_size=self.sizes[i - 1] if i else 0,
            image_embedding=embedding and not self.unconditional,
            diffusion=DiffusionConfig(
                diffusion_steps=self.timesteps,
                noise_schedule=own["beta_schedule"],
                prediction="v" if own["predict_v"] else "x_start" if own["predict_x_start"] else "eps",
                variance="learned_range" if own["learned_variance"] else "fixed_small",
                loss_type=LOSSES[own["loss_type"]],
                learned_variance_constrain_frac=self.learned_variance_constrain_frac,
                vb_loss_weight=self.vb_loss_weight,
                loss_weighting="p2" if gamma else "none",
                p2_gamma=gamma,
                p2_k=self.p2_loss_weight_k,
            ),
            degradation=Degradation(
                self.blur_prob if own["use_blur_for_lowres_cond"] else 0.0,
                (self.blur_sigma[0], self.blur_sigma[-1]),
                (self.blur_kernel_size[0] // 2, self.blur_kernel_size[-1] // 2),
                1.0 if noised else 0.0,
                "linear",
            ),
            downsample_first=self.lowres_downsample_first,
            crop_size=own["random_crop_sizes"] or 0,
            image_drop_prob=self.image_cond_drop_prob,
            text_drop_prob=self.text_cond_drop_prob,
            sampler=(
                SamplerConfig("ancestral", 0)
                if steps in (None, self.timesteps)
                else SamplerConfig("ddim", steps, self.ddim_sampling_eta, "even")
            ),
            guidance=GuidanceConfig(
                thresholding="dynamic" if self.use_dynamic_thres else "static" if self._is_clipped else "none",
                dynamic_percentile=self.dynamic_thres_percentile,
            ),
            noise_level=self.lowres_noise_sample_level if noised else 0.0,
        )

    def named(self, name: str) -> DecoderStage:
        """The settings of the U-Net with this name. InputError if there is none."""
        return self.stage(lookup({each: i for i, each in enumerate(self.names)}, name, "the U-Net"))

    def stages(self) -> tuple[DecoderStage, ...]:
        """The settings of all U-Nets."""
        return tuple(self.stage(i) for i in range(len(self)))

    def same_embeddings(self, other: DecoderConfig) -> bool:
        """Whether both are conditioned on embeddings of the same CLIP, as far as is known."""
        return self.clip is None or other.clip is None or self.clip.is_same(other.clip)

    @property
    def _is_clipped(self) -> bool:
        return self.clip_denoised and self.clip_x_start

    # ----------------------------------------------------------------------------------------------------- validation

    def faults(self) -> Iterator[Fault]:
        wrong = [*self._wrong_values()]
        if not self.unets:
            wrong.append(Fault("unets", "is empty, but must have a U-Net for each resolution"))
        else:
            wrong += [*self._wrong_sizes(), *self._wrong_lists()]
        yield from wrong
        declared: dict[str, Any] = members(type(self))  # type: ignore[arg-type]  # all of them settings, which may be wrong by themselves
        if not wrong and not any(fault for key, each in declared.items() for fault in each.faults(getattr(self, key))):
            yield from self._wrong_stages()

    def _wrong_values(self) -> Iterator[Fault]:
        if self.channels not in (1, 3):
            yield Fault.of(self, "channels", "must be 3 (RGB) or 1 (grayscale)")
        if self.use_dynamic_thres and not self._is_clipped:
            either = f"{named('clip_denoised')} or {named('clip_x_start')}"
            yield Fault("use_dynamic_thres", f"is True, but {either} False: set only one of them")
        for name, least in (("blur_sigma", 0.0), ("blur_kernel_size", 1)):
            values = getattr(self, name)
            if len(values) not in (1, 2) or values[0] < least or values[-1] < values[0]:
                yield Fault.of(self, name, f"must be one number of at least {least:g}, or the ends of a range")
        for size in self.blur_kernel_size:
            if size % 2 == 0:
                yield Fault("blur_kernel_size", f"has {size}, but must be odd")

    def _wrong_sizes(self) -> Iterator[Fault]:
        sizes, count = self.sizes, quantity(len(self), "U-Net")
        if sizes and not self.image_sizes and sizes[0] < 1:
            yield Fault.of(self, "image_size", "must be at least 1")
        elif not sizes:
            yield Fault("image_sizes", f"is missing, but must have a size for each of the {count}")
        elif len(sizes) != len(self):
            rule = f"has {quantity(len(sizes), 'size')}, but there are {count} in {named('unets')}: give one for each"
            yield Fault("image_sizes", rule)
        else:
            for before, after in itertools.pairwise(sizes):
                if after <= before or (before > 0 and after % before):
                    rule = f"has {after} after {before}, but must be a larger multiple of the one before"
                    yield Fault("image_sizes", rule)

    def _wrong_lists(self) -> Iterator[Fault]:
        """Lists with another number of values than there are U-Nets."""
        for name, values in self.lists().items():
            if values is None:
                continue
            of_upsamplers = name in PER_UPSAMPLER
            if len(values) not in (1, len(self), max(len(self) - of_upsamplers, 1)):
                has = f"has {quantity(len(values), 'value')} for {quantity(len(self), 'U-Net')}"
                yield Fault(name, f"{has}: give one for all, or one for each")
            elif of_upsamplers and len(values) == len(self) > 1 and values[0]:
                start = "none" if name == "random_crop_sizes" else "False"
                has = f"begins with {values[0]}, but the first U-Net has no low-resolution image"
                yield Fault(name, f"{has}: begin with {start}")

    def _wrong_stages(self) -> Iterator[Fault]:
        """What is wrong with single U-Nets, whose settings have the right form."""
        schedules = self.beta_schedule or (("cosine",) if len(self) == 1 else ("cosine", "linear"))
        for schedule in dict.fromkeys(schedules):
            try:
                get_named_beta_schedule(schedule, self.timesteps)
            except InputError as error:
                for fault in error.faults:
                    rule = spelled(fault.rule, lambda name: named(_OWN_NAMES.get(name, name)))
                    yield replace(fault, setting=_OWN_NAMES.get(fault.setting, fault.setting), rule=rule)
                return
        for steps in self.sample_timesteps:
            if steps is not None and not min(2, self.timesteps) <= steps <= self.timesteps:
                rule = f"has {steps}, but must lie between 2 and {named('timesteps')} ({self.timesteps})"
                yield Fault("sample_timesteps", rule)
                return
        for i, stage in enumerate(self.stages()):
            yield from self._wrong_stage(f"unets[{i}]", self.unets[i].channels, stage)

    def _wrong_stage(self, name: str, channels: int, stage: DecoderStage) -> Iterator[Fault]:
        """name, channels: of the U-Net among the settings."""
        unet, crop = stage.unet, stage.crop_size
        if channels not in (3, unet.channels):  # 3 may be the default
            rule = f"is {channels}, but {named('channels')}, which is for all U-Nets, is {unet.channels}"
            yield Fault(f"{name}.channels", rule)
        if stage.image_embedding and unet.image_embed_dim is None:
            rule = "is missing, but the U-Net is conditioned on image embeddings: set it"
            yield Fault(f"{name}.image_embed_dim", rule)
        if unet.cond_on_image_embeds and not stage.image_embedding:
            rule = f"is True, but the decoder is {named('unconditional')}: leave one of them out"
            yield Fault(f"{name}.cond_on_image_embeds", rule)
        try:
            unet.check_size(stage.image_size, stage.image_size)
        except InputError as error:
            yield Fault(name, f": {error}")
        if not stage.is_upsampler:
            return
        if not (stage.has_noise or stage.degradation.blur_prob):
            blur, prob, noise = map(named, ("use_blur_for_lowres_cond", "blur_prob", "use_noise_for_lowres_cond"))
            rule = (
                "upsamples images that are neither blurred nor noised in training, and would not stand the errors of "
                f"the U-Net before: set {blur} (and {prob}) or {noise}"
            )
            yield Fault(name, rule)
        if crop and (crop < 0 or crop > stage.image_size or crop % stage.factor or crop % unet.divisor):
            rule = (
                f"has crops of {crop} pixels in {named('random_crop_sizes')}, but they must be at most "
                f"{stage.image_size} and multiples of {stage.factor} (the upsampling factor) and {unet.divisor} (the "
                "network's divisor)"
            )
            yield Fault(name, rule)


Owner = tuple[str, DecoderConfig, DecoderStage]  # the name of a U-Net for messages, its decoder, and itself


def check_same_embeddings(one: Owner, other: Owner) -> None:
    """InputError if two U-Nets that are conditioned on image embeddings cannot be given the same ones."""
    (name, decoder, stage), (other_name, other_decoder, other_stage) = one, other
    if not (stage.image_embedding and other_stage.image_embedding):
        return
    if stage.unet.image_embed_dim != other_stage.unet.image_embed_dim:
        raise InputError(
            f"{name} has image embeddings of width {stage.unet.image_embed_dim}, but {other_name} of width "
            f"{other_stage.unet.image_embed_dim}: give U-Nets trained on the same embeddings"
        )
    if not decoder.same_embeddings(other_decoder):
        raise InputError(
            f"{name} was trained on embeddings of {decoder.clip}, but {other_name} on those of {other_decoder.clip}: "
            "give U-Nets trained on the same embeddings"
        )
