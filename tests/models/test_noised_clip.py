"""Noised CLIP: features, logit scale, invalid settings."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from clip_making import CONFIG, VOCABULARY, make_batch, make_clip
from refusing import refused
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.config import InputError
from diff_dalle.models.noised_clip import NoisedClip
from diff_dalle.training.optim import decayed

BATCH, T = make_batch(range(5)), torch.tensor([0, 10, 300, 600, 999])


def features(clip, batch=BATCH, t=T, keys=None):
    return clip.encode_image(batch.images, t, keys), clip.encode_text(batch.cond.tokens, batch.cond.mask, keys)


@pytest.mark.parametrize("half", [False, True])
def test_features_are_normalized_in_float32(half):
    clip = make_clip()
    with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
        found = features(clip)
    for part, exact in zip(found, features(clip), strict=True):
        assert part.dtype == torch.float32 and part.shape == (5, 12)
        assert_close(part.norm(dim=1), torch.ones(5), rtol=0, atol=1e-6)
        assert (part * exact).sum(1).min() > (0.995 if half else 1 - 1e-6)


def test_padding_never_leaks():
    """Other padding tokens, or fewer of them, change nothing; another real token does."""
    clip, (tokens, mask) = make_clip(), (BATCH.cond.tokens, BATCH.cond.mask)
    text, shortest = clip.encode_text(tokens, mask), int(mask.sum(1).min())
    assert_close(clip.encode_text(torch.where(mask, tokens, 3), mask), text)
    cut = tokens[:, :shortest], mask[:, :shortest]
    ends = mask.sum(1) == shortest
    assert_close(clip.encode_text(*cut)[ends], text[ends])
    changed = tokens.index_fill(1, torch.tensor([0]), 3)
    assert (clip.encode_text(changed, mask) - text).norm(dim=1).min() > 1e-3


def test_the_feature_is_taken_at_the_end_token():
    clip, (tokens, mask) = make_clip(), (BATCH.cond.tokens, BATCH.cond.mask)
    states = clip.text_tower(tokens, mask)[0]
    ends = torch.stack([states[i, int(mask[i].sum()) - 1] for i in range(5)])
    assert_close(clip.encode_text(tokens, mask), F.normalize(clip.text_tower.pool(ends), dim=1))


def test_image_features_depend_on_the_timestep():
    clip = make_clip()
    one, other = (features(clip, t=torch.full((5,), t))[0] for t in (0, 500))
    assert (one - other).norm(dim=1).min() > 1e-3


def test_pooling_depends_on_positions():
    """Without the position embedding of attention pooling, an image and its mirror image have equal features."""
    clip = make_clip(classifier_patch_size=4, classifier_channel_mult=(1,), classifier_attention_resolutions=())
    with torch.no_grad():  # only the pooling may distinguish left from right
        for parameter in clip.image_tower.parameters():
            if parameter.dim() == 4 and parameter.shape[2] == 3:
                parameter[..., [0, 2]] = 0
    flat = replace(BATCH, images=BATCH.images[:, :, :4].tile(1, 1, 2, 1))
    flat.images[..., 4:] = flat.images[..., :4] + 1
    mirrored = replace(flat, images=flat.images.roll(4, 3))
    assert (features(clip, flat)[0] - features(clip, mirrored)[0]).norm(dim=1).min() > 1e-4
    with torch.no_grad():
        clip.pool.position_emb.zero_()
    assert_close(features(clip, flat)[0], features(clip, mirrored)[0], rtol=0, atol=1e-5)


def test_the_scale_starts_as_published_and_stays_below_100():
    clip = NoisedClip(CONFIG, VOCABULARY)
    assert clip.scale.item() == pytest.approx(1 / 0.07, rel=1e-5)
    scales = []
    for value in (2.0, 5.0, 8.0):
        clip.scale_logit.data.fill_(value)
        scales.append(clip.scale.item())
        (gradient,) = torch.autograd.grad(clip.scale, clip.scale_logit)
        assert gradient > 0  # unlike that of a clamp
    assert scales == sorted(scales) and 99 < scales[-1] < 100


@pytest.mark.parametrize("size", [(8, 16), (16, 16), (4, 4)])
def test_images_of_another_size_are_refused(size):
    with refused(rf"takes images of 8×8 pixels \(image_size\), not of {size[1]}×{size[0]}"):
        make_clip().encode_image(torch.zeros(1, 3, *size), T[:1])


@pytest.mark.parametrize(
    "change",
    [
        {"classifier_width": 0},
        {"classifier_depth": 0},
        {"classifier_channel_mult": (0.3,)},
        {"classifier_num_heads": 5},
        {"classifier_num_head_channels": 5},
        {"classifier_text_padding": "learned"},
        {"classifier_dropout": 1.0},
        {"classifier_patch_size": 0},
        {"classifier_enc_attn_dim": 0},
        {"classifier_enc_attn_dim": 13},
        {"classifier_enc_depth": 0},
        {"classifier_enc_heads": 5},
        {"text_length": 0},
        {"dropout_text": -0.1},
        {"image_size": 9},
    ],
)
def test_impossible_settings_are_named_by_their_flags(change):
    """Not by the names of the towers' settings."""
    with pytest.raises(InputError) as error:
        replace(CONFIG, **change)
    (name,), text = change, str(error.value)
    assert re.search(rf"\b{name}\b", text)
    assert not re.search(r"\b(num_\w+|enc_\w+|channel_mult|dropout|patch_size)\b", text)


def test_captions_longer_than_text_length_are_refused():
    tokens = torch.zeros(1, CONFIG.text_length + 1, dtype=torch.int64)
    make_clip(text_length=CONFIG.text_length + 1).encode_text(tokens, tokens == 0)
    with refused("8 tokens, but text_length is 7"):
        make_clip().encode_text(tokens, tokens == 0)


def test_weight_decay_excludes_norms_biases_embeddings_and_scale():
    clip = make_clip()
    with_decay = decayed(clip)
    names = {name for name, _ in clip.named_parameters()}
    excluded = {name for name, parameter in clip.named_parameters() if id(parameter) not in with_decay}
    tables = {"scale_logit", "pool.position_emb", "text_tower.position_emb", "text_tower.token_emb.weight"}
    norms = {name for name in names if "norm" in name}
    assert norms and excluded == tables | norms | {name for name in names if name.endswith(".bias")}
