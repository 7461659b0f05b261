"""The rules that hold between the sections of a decoder's file."""

from __future__ import annotations

from collections.abc import Iterator

from ...checkpoints.decoder import DecoderConfig
from ...embeddings.image_sizes import known_image_size
from ...errors import InputError, quantity
from ...evaluation.generated_config import GeneratedMetricsConfig
from ...images.preprocessing import least_side, output_size
from .data_section import DataSection
from .tracker_section import TrackerSection
from .train_section import PER_UNET, TrainSection, at


def wrong_between(
    decoder: DecoderConfig,
    data: DataSection,
    train: TrainSection,
    evaluate: GeneratedMetricsConfig,
    tracker: TrackerSection,
) -> Iterator[str]:
    """What is wrong between the sections: sentences that begin with the path of a setting. Each section is checked by
    itself as well, and may have failed."""
    yield from _wrong_lists(decoder, train)
    yield from _wrong_sizes(decoder, data, train)
    yield from _wrong_sources(decoder, data, evaluate)
    yield from _wrong_widths(decoder)
    yield from _wrong_scales(decoder, train)
    yield from _wrong_counts(data, train, tracker)
    if evaluate.given and not data.splits.val:
        yield "data.splits.val is 0, but evaluate measures images of that split: raise it, or leave the metrics out"
    if evaluate.needs_clip and decoder.clip is None and not data.img_embeddings_url:  # whose CLIP may be recorded
        yield "evaluate has the feature clip, but there is no decoder.clip: name one, or another feature"


def last_trained(decoder: DecoderConfig, train: TrainSection) -> int:
    """The number of the last U-Net that is trained."""
    count, mask = len(decoder), train.unet_training_mask
    if mask is None or len(mask) != count:
        return count - 1
    return max((i for i, is_trained in enumerate(mask) if is_trained), default=count - 1)


def too_small(clip: str, seen: int, data: DataSection) -> Iterator[str]:
    """A sentence if preprocessing makes images smaller than those that the CLIP sees. seen: their width and height."""
    side = least_side(data.preprocessing)
    if side is not None and seen > side:
        yield (
            f"decoder.clip: {clip} sees images of {seen} pixels, but data.preprocessing makes {side}: raise its "
            "size, or give data.img_embeddings_url"
        )


def _wrong_lists(decoder: DecoderConfig, train: TrainSection) -> Iterator[str]:
    count, unets = len(decoder), quantity(len(decoder), "U-Net")
    mask = train.unet_training_mask
    if mask is not None and len(mask) != count:
        entries = f"{len(mask)} entr{'y' if len(mask) == 1 else 'ies'}"
        yield f"train.unet_training_mask has {entries}, but decoder.unets has {unets}: give one for each"
    wrong = False
    for name in PER_UNET:
        values = getattr(train, name)
        if len(values) not in (1, count):
            wrong = True
            yield f"train.{name} has {quantity(len(values), 'value')} for {unets}: give one for all, or one for each"
    for i in () if wrong else range(count):
        optim = train.optimizer(i)
        if optim is None:
            yield (
                f"train.warmup_steps of U-Net {i} is {at(train.warmup_steps, i)}, but must be below its "
                f"cosine_decay_max_steps ({at(train.cosine_decay_max_steps, i)})"
            )


def _wrong_sizes(decoder: DecoderConfig, data: DataSection, train: TrainSection) -> Iterator[str]:
    """Images that preprocessing makes smaller than what is trained on them or seen by a CLIP."""
    side, made = least_side(data.preprocessing), output_size(data.preprocessing)
    if made and made[0] != made[1]:
        yield f"data.preprocessing makes images of {made[1]}×{made[0]} pixels, but they must be square"
    if side is None or not decoder.sizes:
        return
    largest = max(decoder.sizes[: last_trained(decoder, train) + 1])
    if largest > side:
        yield (
            f"data.preprocessing makes images of {side} pixels, but the U-Nets that are trained need {largest} "
            "(decoder.image_sizes): raise its size"
        )
    embeds = not data.img_embeddings_url and any(stage.image_embedding for stage in decoder.stages())
    if (clip := decoder.clip) and embeds:
        try:
            yield from too_small(clip.model, known_image_size(clip.make, clip.model), data)
        except InputError as error:
            yield f"decoder.clip: {error}"


def _wrong_sources(decoder: DecoderConfig, data: DataSection, evaluate: GeneratedMetricsConfig) -> Iterator[str]:
    """Embeddings from two places. Whether they come from anywhere turns out when the shards are opened."""
    has_text = any(unet.cond_on_text_encodings for unet in decoder.unets)
    if data.text_embeddings_url and not has_text:
        yield (
            "data.text_embeddings_url is given, but no U-Net has cond_on_text_encodings: leave it out, or set "
            "cond_on_text_encodings"
        )
    if decoder.unconditional and data.img_embeddings_url:
        yield "data.img_embeddings_url is given, but the decoder is unconditional: leave one of them out"
    if decoder.clip is None or not data.img_embeddings_url or decoder.clip.identity or evaluate.needs_clip:
        return  # one with an identity is the CLIP of the embeddings, as training records it
    if not has_text or data.text_embeddings_url:
        both = " and data.text_embeddings_url" if has_text else ""
        yield (
            f"data.img_embeddings_url{both} is given beside decoder.clip, which would have nothing to embed: leave one "
            "of them out"
        )


def _wrong_widths(decoder: DecoderConfig) -> Iterator[str]:
    """Widths in which U-Nets differ that get the same embeddings."""
    images = [
        unet
        for i, unet in enumerate(decoder.unets)
        if unet.cond_on_image_embeds in ((None, True) if not i else (True,))
    ]
    texts = [unet for unet in decoder.unets if unet.cond_on_text_encodings]
    for name, unets in (("image_embed_dim", images), ("text_embed_dim", texts)):
        widths = list(dict.fromkeys(value for unet in unets if (value := getattr(unet, name)) is not None))
        if len(widths) > 1:
            listed = " and ".join(map(str, widths))
            yield f"decoder.unets have {name} {listed}, but all get the same embeddings: give all the same"


def _wrong_scales(decoder: DecoderConfig, train: TrainSection) -> Iterator[str]:
    """Guidance of U-Nets that never learn to do without their conditions, and scales that cannot be compared."""
    given, count, droppable = train.cond_scale, len(decoder), [stage.droppable for stage in decoder.stages()]
    if count > 1 and len(given) not in (1, count):
        yield (
            f"train.cond_scale has {quantity(len(given), 'value')} for {quantity(count, 'U-Net')}: give one for all, "
            "one for each, or a list of a list to compare them"
        )
        return
    scales = [train.scales(i, count, can) for i, can in enumerate(droppable)]
    if not any(droppable) and len(given) == 1 and (wrong := [scale for scale in given[0] if scale != 1]):
        yield (
            f"train.cond_scale is {wrong[0]:g}, but no U-Net drops a condition in training: set it to 1, or raise "
            "decoder.image_cond_drop_prob"
        )
        return
    for i, (own, can) in enumerate(zip(scales, droppable, strict=True)):
        if not can and (wrong := [scale for scale in own if scale != 1]):
            yield f"train.cond_scale has {wrong[0]:g} for U-Net {i}, which drops no condition in training: set it to 1"
        if twice := next((scale for scale in own if own.count(scale) > 1), None):
            yield f"train.cond_scale has {twice:g} twice for U-Net {i}: give each scale to compare once"
    if len(set(map(len, scales)) - {1}) > 1:
        yield (
            f"train.cond_scale has {', '.join(str(len(own)) for own in scales)} scales for the U-Nets, but they are "
            "compared one by one: give each U-Net one, or as many as the others"
        )


def _wrong_counts(data: DataSection, train: TrainSection, tracker: TrackerSection) -> Iterator[str]:
    if train.validation_samples and not data.splits.val:
        yield f"train.validation_samples is {train.validation_samples}, but data.splits.val is 0: set one of them"
    if train.max_batch_size and train.max_batch_size > data.batch_size:
        yield (
            f"train.max_batch_size is {train.max_batch_size}, but is a part of data.batch_size ({data.batch_size}): "
            "lower it, or leave it out"
        )
    if not data.splits.val and any(saver.save_best_to for saver in tracker.save):
        yield "tracker.save has save_best_to, but without data.splits.val there is no validation loss: leave it out"
