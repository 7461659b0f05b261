"""The rules that hold between the sections of a decoder's file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...checkpoints.decoder import DecoderConfig
from ...config import Fault, InputError, faults_of, named, quantity
from ...embeddings.clip import known_image_size
from ...evaluation.generated_config import GeneratedMetricsConfig
from ...images.preprocessing import least_side, output_size
from .sections import PER_UNET, DataSection, TrackerSection, TrainSection, at


def wrong_between(
    decoder: DecoderConfig,
    data: DataSection,
    train: TrainSection,
    evaluate: GeneratedMetricsConfig,
    tracker: TrackerSection,
) -> Iterator[Fault]:
    """What is wrong between the sections. Each is checked by itself as well, and may have failed."""
    for wrong in (
        _wrong_lists(decoder, train),
        _wrong_sizes(decoder, data, train),
        _wrong_sources(decoder, data, evaluate),
        _wrong_scales(decoder, train),
    ):
        with contextlib.suppress(InputError):  # of a U-Net that cannot be made, as the decoder's own check tells
            yield from wrong
    if train.max_batch_size and train.max_batch_size > data.batch_size:
        rule = f"is a part of {named('data.batch_size')} ({data.batch_size}): lower it, or leave it out"
        yield Fault("train.max_batch_size", rule, train.max_batch_size)
    if data.splits.val:
        return
    if evaluate.given:
        rule = "evaluate measures images of that split: raise it, or leave the metrics out"
        yield Fault("data.splits.val", rule, data.splits.val)
    if train.validation_samples:
        rule = f"{named('data.splits.val')} is 0: set one of them"
        yield Fault("train.validation_samples", rule, train.validation_samples)
    if any(saver.save_best_to for saver in tracker.save):
        rule = f"has save_best_to, but without {named('data.splits.val')} there is no validation loss: leave it out"
        yield Fault("tracker.save", rule)


def last_trained(decoder: DecoderConfig, train: TrainSection) -> int:
    """The number of the last U-Net that is trained."""
    count, mask = len(decoder), train.unet_training_mask
    if mask is None or len(mask) != count:
        return count - 1
    return max((i for i, is_trained in enumerate(mask) if is_trained), default=count - 1)


def too_small(clip: str, seen: int, data: DataSection) -> Iterator[Fault]:
    """Whether preprocessing makes images smaller than those that the CLIP sees. seen: their width and height."""
    side = least_side(data.preprocessing)
    if side is not None and seen > side:
        made = f"sees images of {seen} pixels, but {named('data.preprocessing')} makes {side}"
        yield Fault("decoder.clip", f"{clip} {made}: raise its size, or give {named('data.img_embeddings_url')}")


def _wrong_lists(decoder: DecoderConfig, train: TrainSection) -> Iterator[Fault]:
    count, unets = len(decoder), quantity(len(decoder), "U-Net")
    mask = train.unet_training_mask
    if mask is not None and len(mask) != count:
        entries = f"{len(mask)} entr{'y' if len(mask) == 1 else 'ies'}"
        rule = f"has {entries}, but {named('decoder.unets')} has {unets}: give one for each"
        yield Fault("train.unet_training_mask", rule)
    wrong = [name for name in PER_UNET if len(getattr(train, name)) not in (1, count)]
    for name in wrong:
        values = quantity(len(getattr(train, name)), "value")
        yield Fault(f"train.{name}", f"has {values} for {unets}: give one for all, or one for each")
    for i in () if wrong else range(count):
        warmup, decay = at(train.warmup_steps, i) or 0, at(train.cosine_decay_max_steps, i) or 0
        if 0 < decay <= warmup:
            rule = f"must be below its {named('train.cosine_decay_max_steps')} ({decay})"
            yield Fault("train.warmup_steps", f"of U-Net {i} is {warmup}, but {rule}")


def _wrong_sizes(decoder: DecoderConfig, data: DataSection, train: TrainSection) -> Iterator[Fault]:
    """Images that preprocessing makes smaller than what is trained on them or seen by a CLIP."""
    side, made = least_side(data.preprocessing), output_size(data.preprocessing)
    if made and made[0] != made[1]:
        yield Fault("data.preprocessing", f"makes images of {made[1]}×{made[0]} pixels, but they must be square")
    if side is None or not decoder.sizes:
        return
    largest = max(decoder.sizes[: last_trained(decoder, train) + 1])
    if largest > side:
        needed = f"the U-Nets that are trained need {largest} ({named('decoder.image_sizes')})"
        yield Fault("data.preprocessing", f"makes images of {side} pixels, but {needed}: raise its size")
    embeds = not data.img_embeddings_url and any(stage.image_embedding for stage in decoder.stages())
    if (clip := decoder.clip) and embeds:

        def check() -> None:
            InputError.check(too_small(clip.model, known_image_size(clip.make, clip.model), data))

        yield from faults_of(check, "decoder.clip")


def _wrong_sources(decoder: DecoderConfig, data: DataSection, evaluate: GeneratedMetricsConfig) -> Iterator[Fault]:
    """Embeddings from two places, and widths in which U-Nets differ that get the same ones. Whether they come from
    anywhere turns out when the shards are opened."""
    has_text, is_named = any(unet.cond_on_text_encodings for unet in decoder.unets), decoder.clip is not None
    if data.text_embeddings_url and not has_text:
        option = "cond_on_text_encodings"
        yield Fault("data.text_embeddings_url", f"is given, but no U-Net has {option}: leave it out, or set {option}")
    if decoder.unconditional and data.img_embeddings_url:
        yield Fault("data.img_embeddings_url", "is given, but the decoder is unconditional: leave one of them out")
    if evaluate.needs_clip and not is_named and not data.img_embeddings_url:  # whose CLIP may be recorded
        rule = f"has the feature clip, but there is no {named('decoder.clip')}: name one, or another feature"
        yield Fault("evaluate", rule)
    # One with an identity is the CLIP of the embeddings, as training records it.
    is_needed = decoder.clip is not None and (decoder.clip.identity or evaluate.needs_clip)
    has_all = data.img_embeddings_url and (not has_text or data.text_embeddings_url)
    if is_named and has_all and not is_needed:
        both = f" and {named('data.text_embeddings_url')}" if has_text else ""
        rule = f"given beside {named('decoder.clip')}, which would have nothing to embed: leave one of them out"
        yield Fault("data.img_embeddings_url", f"{both} is {rule}".strip())
    images = [
        each
        for i, each in enumerate(decoder.unets)
        if each.cond_on_image_embeds in ((None, True) if i == 0 else (True,))
    ]
    texts = [unet for unet in decoder.unets if unet.cond_on_text_encodings]
    for name, unets in (("image_embed_dim", images), ("text_embed_dim", texts)):
        widths = list(dict.fromkeys(value for unet in unets if (value := getattr(unet, name)) is not None))
        if len(widths) > 1:
            listed = " and ".join(map(str, widths))
            rule = f"have {name} {listed}, but all get the same embeddings: give all the same"
            yield Fault("decoder.unets", rule)


def _wrong_scales(decoder: DecoderConfig, train: TrainSection) -> Iterator[Fault]:
    """Guidance of U-Nets that never learn to do without their conditions, and scales that cannot be compared."""
    setting = "train.cond_scale"
    given, count, droppable = train.cond_scale, len(decoder), [stage.droppable for stage in decoder.stages()]
    if count > 1 and len(given) not in (1, count):
        counts = f"{quantity(len(given), 'value')} for {quantity(count, 'U-Net')}"
        rule = f"has {counts}: give one for all, one for each, or a list of a list to compare them"
        yield Fault(setting, rule)
        return
    scales = [train.scales(i, count, can) for i, can in enumerate(droppable)]
    if not any(droppable) and len(given) == 1 and (wrong := [scale for scale in given[0] if scale != 1]):
        remedy = f"set it to 1, or raise {named('decoder.image_cond_drop_prob')}"
        yield Fault(setting, f"is {wrong[0]:g}, but no U-Net drops a condition in training: {remedy}")
        return
    for i, (own, can) in enumerate(zip(scales, droppable, strict=True)):
        if not can and (wrong := [scale for scale in own if scale != 1]):
            rule = f"has {wrong[0]:g} for U-Net {i}, which drops no condition in training: set it to 1"
            yield Fault(setting, rule)
        if twice := next((scale for scale in own if own.count(scale) > 1), None):
            yield Fault(setting, f"has {twice:g} twice for U-Net {i}: give each scale to compare once")
    if len(set(map(len, scales)) - {1}) > 1:
        counts = ", ".join(str(len(own)) for own in scales)
        rule = "but they are compared one by one: give each U-Net one, or as many as the others"
        yield Fault(setting, f"has {counts} scales for the U-Nets, {rule}")
