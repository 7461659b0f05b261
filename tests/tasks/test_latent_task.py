"""Training stages B and C: latents, conditions and what is dropped of them, adaptive weights, previews."""

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from network_making import VOCABULARY, randomize
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.cascade import LatentSampling
from diff_dalle.diffusion.log_snr import LogSnrProcess
from diff_dalle.diffusion.log_snr_config import LogSnrConfig
from diff_dalle.images.signal import LatentSignal
from diff_dalle.models.latent.config import LatentTextConfig
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stage_a import StageA, StageAConfig
from diff_dalle.models.latent.stages import StageB, StageBConfig, StageC, StageCConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks.latent import (
    IMAGE_CLIP,
    SEMANTIC,
    STAGE_A,
    TEXT_CLIP,
    StageBTask,
    StageBTaskConfig,
    StageCTask,
    StageCTaskConfig,
)
from diff_dalle.tasks.previews import LatentPreviews

SHAPE = {
    "widths": (8, 8), "heads": (0, 2), "levels": ("CT", "CTA"), "down_blocks": (1, 1), "up_blocks": (1, 1),
    "down_repeats": (1, 1), "up_repeats": (1, 1), "dropout": (0.0, 0.0), "cond_width": 8, "time_width": 8,
    "micro_conditions": (),
}  # fmt: skip
OWN_TEXT = LatentTextConfig(enc_attn_dim=8, enc_depth=1, enc_heads=2, text_length=5)
LENGTH, WIDTH, EMBED = 4, 6, 7  # of the CLIP's texts, token states and embeddings


class Texts(nn.Module):
    """A CLIP whose encodings say what it was given."""

    text_length, embed_dim, text_width = LENGTH, EMBED, WIDTH

    def tokenize(self, texts, length):
        assert texts == [""] and length == LENGTH
        return torch.tensor([[49, 48, 0, 0]]), torch.tensor([[True, False, False, False]])

    def encode_tokens(self, tokens, mask):
        states = tokens[:, :, None].expand(-1, -1, WIDTH).float().masked_fill(~mask[:, :, None], 0.0)
        return tokens[:, :1].expand(-1, EMBED).float(), states

    def encode_text(self, texts):
        tokens, mask = self.tokenize(texts, LENGTH)
        return *self.encode_tokens(tokens, mask), mask

    def states_mask(self, mask):
        return mask

    def encode_images(self, images):
        return images.mean((1, 2, 3))[:, None].expand(-1, EMBED)


def make_batch(positions=range(4), size=(32, 32), length=5) -> Batch:
    index = torch.tensor(list(positions))
    draw = Draw(9, index)
    tokens = torch.stack([draw.uniform(f"token {i}") * (VOCABULARY - 1) for i in range(length)], 1).long()
    mask = torch.arange(length) < 1 + (draw.uniform("length") * length).long()[:, None]
    return Batch(torch.tanh(draw.normal("image", (3, *size))), Conditioning(tokens=tokens, mask=mask), index)


def frozen(task):
    torch.manual_seed(1)
    if isinstance(task, StageBTask):
        task.add_companion(STAGE_A, randomize(StageA(StageAConfig(width=8, bottleneck_blocks=1, codebook_size=4))))
    task.add_companion(
        SEMANTIC,
        SemanticAutoencoder(SemanticConfig(stride=8, encoder_width=4, encoder_blocks=1, previewer_width=8)),
    )
    return task


def stage_b(diffusion=None, text=OWN_TEXT, **settings) -> StageBTask:
    torch.manual_seed(0)
    outside = {} if text.enc_attn_dim else {"pooled_width": settings.pop("pooled_width", 0)}
    config = StageBConfig(**SHAPE, **outside, text=text, pixel_channels=0)
    process = LogSnrProcess(diffusion or LogSnrConfig())
    return frozen(StageBTask(randomize(StageB(config, VOCABULARY)), process, StageBTaskConfig(**settings)))


def stage_c(diffusion=None, clip=False, **settings) -> StageCTask:
    torch.manual_seed(0)
    outside = {"text_width": WIDTH, "pooled_width": EMBED} if clip else {}
    text = replace(OWN_TEXT, enc_attn_dim=0) if clip else OWN_TEXT
    config = StageCConfig(**SHAPE, **outside, text=text, image_width=EMBED if clip else 0)
    process = LogSnrProcess(diffusion or LogSnrConfig())
    task = frozen(StageCTask(randomize(StageC(config, VOCABULARY)), process, StageCTaskConfig(**settings)))
    if clip:
        task.companions |= {TEXT_CLIP: Texts(), IMAGE_CLIP: Texts()}
    return task


def draw_of(batch: Batch) -> Draw:
    return Draw(3, batch.index)


# ----------------------------------------------------------------------------------------------------------- conditions


def test_each_stage_denoises_its_own_latents():
    batch = make_batch()
    for task, name in ((stage_b(), STAGE_A), (stage_c(), SEMANTIC)):
        assert_close(task.latents(batch), task.companions[name].encode(batch.images))
    assert stage_b().latents(batch).shape[1:] == (4, 8, 8)
    assert stage_c().latents(batch).shape[1:] == (16, 4, 4)


def test_the_semantic_map_in_training_is_of_an_image_scaled_at_random():
    task, batch, seen = stage_b(semantic_dropout=0.0), make_batch(range(60), size=(64, 32)), []
    encode = task.companions[SEMANTIC].encode
    task.companions[SEMANTIC].encode = lambda images: seen.append((len(images), *images.shape[2:])) or encode(images)
    cond = task.condition(batch, draw_of(batch))
    counts = {(height, width): count for count, height, width in seen}
    assert sum(counts.values()) == 60 and len(counts) == len(seen)  # each size in one pass
    # (floor(64 f / 8) 8, floor(32 f / 8) 8) for f in [.5, 1)
    assert set(counts) == {(32, 16), (40, 16), (48, 24), (56, 24)}
    assert cond.semantic.shape == (60, 16, 8, 4)  # the network's first level: 64 / 4 / 2
    alone = task.condition(batch.select([7]), draw_of(batch.select([7])))
    assert_close(alone.semantic[0], cond.semantic[7], rtol=1e-4, atol=1e-5)
    whole = task.condition(batch)
    assert_close(whole.semantic, encode(batch.images))
    wide = stage_b(semantic_dropout=0.0, semantic_scale=(1.0, 1.0)).condition(batch, draw_of(batch))
    assert wide.semantic.shape == (60, 16, 8, 4)


def test_the_semantic_map_has_a_position_at_least():
    """Of an image as small as the encoder's stride, whatever the factor."""
    task, batch = stage_b(semantic_dropout=0.0, semantic_scale=(0.1, 0.5)), make_batch(size=(8, 24))
    assert task.condition(batch, draw_of(batch)).semantic.shape == (4, 16, 1, 3)


def test_the_map_is_dropped_and_the_caption_emptied_each_with_its_own_probability():
    batch = make_batch(range(400))
    task = stage_b(semantic_dropout=0.25, text_dropout=0.5)
    cond = task.condition(batch, draw_of(batch))
    no_map = (cond.semantic == 0).flatten(1).all(1)
    no_text = cond.mask.sum(1) == 1
    own = batch.cond.mask.sum(1) == 1
    assert 0.18 < no_map.float().mean() < 0.32 and 0.4 < no_text[~own].float().mean() < 0.6
    assert 0.05 < (no_map & no_text)[~own].float().mean() < 0.2
    whole = task.condition(batch)
    assert not (whole.semantic == 0).flatten(1).all(1).any() and torch.equal(whole.mask, batch.cond.mask)
    kept = stage_b(semantic_dropout=0.0, text_dropout=0.0).condition(batch, draw_of(batch))
    assert torch.equal(kept.mask, batch.cond.mask) and not (kept.semantic == 0).flatten(1).all(1).any()


def test_a_clip_encodes_the_captions_and_the_empty_one():
    batch = make_batch(range(300), length=LENGTH)
    task = stage_c(clip=True, text_dropout=0.3, image_dropout=0.6)
    cond = task.condition(batch, draw_of(batch))
    assert cond.tokens is None
    tokens, mask = batch.cond.caption
    assert not (tokens[:, 0] == 49).any()  # what only the empty caption begins with
    empty = (cond.text_states[:, 0] == 49).all(1)
    assert 0.2 < empty.float().mean() < 0.4
    assert (cond.text_pooled[empty] == 49).all() and (cond.text_states[empty, 1:] == 0).all()
    expected_pooled, expected_states = Texts().encode_tokens(tokens, mask)
    assert_close(cond.text_states[~empty], expected_states[~empty])
    assert_close(cond.text_pooled[~empty], expected_pooled[~empty])
    assert torch.equal(cond.mask[~empty], mask[~empty]) and (cond.mask[empty].sum(1) == 1).all()
    no_image = (cond.image_embedding == 0).all(1)
    assert 0.5 < no_image.float().mean() < 0.7
    assert 0.1 < (no_image & empty).float().mean() < 0.26
    assert_close(cond.image_embedding[~no_image], Texts().encode_images(batch.images)[~no_image])
    whole = task.condition(batch)
    assert whole.image_embedding is None
    assert_close(whole.text_states, expected_states)


def stored_of(task, batch) -> Batch:
    """A batch with what the frozen networks make of it, and nothing else."""
    cond = Conditioning(extra={f"{task.autoencoder}_map": task.latents(batch)})
    if isinstance(task, StageBTask):
        cond.extra["semantic_map"] = task.encoder.encode(functional.interpolate(batch.images, (48, 24)))
    else:
        cond = replace(cond, image_embedding=Texts().encode_images(batch.images))
    pooled, states = Texts().encode_tokens(*batch.cond.caption)
    cond = replace(cond, extra={**cond.extra, "text_embedding": pooled})
    if isinstance(task, StageCTask):
        cond = replace(cond, text_states=states, mask=batch.cond.mask)
    return Batch(torch.empty(len(batch), 0, 0, 0), cond, batch.index)


@pytest.mark.parametrize("name", ["b", "c"])
def test_what_a_batch_has_is_not_made(name):
    """Conditions, what is dropped of them, and losses are the same."""
    if name == "b":
        text = replace(OWN_TEXT, enc_attn_dim=0)
        settings = {"semantic_scale": (0.75, 0.75), "semantic_dropout": 0.3}
        task = stage_b(text=text, pooled_width=EMBED, text_dropout=0.5, **settings)
        task.companions[TEXT_CLIP] = Texts()
    else:
        task = stage_c(clip=True, text_dropout=0.5, image_dropout=0.5)
    batch = make_batch(range(40), size=(64, 32), length=LENGTH)
    stored, draw = stored_of(task, batch), draw_of(batch)
    made, found = (task.condition(each, draw).present() for each in (batch, stored))
    assert made.keys() == found.keys() and len(made) == (2 if name == "b" else 5)
    for key, value in made.items():
        assert_close(found[key], value, msg=key)
    assert_close(task.losses(stored, draw)["loss"], task.losses(batch, draw)["loss"])


def test_a_stage_without_text_reads_none():
    task = stage_b(text=replace(OWN_TEXT, enc_attn_dim=0))
    batch = replace(make_batch(), cond=Conditioning())
    cond = task.condition(batch, draw_of(batch))
    assert list(cond.present()) == ["semantic"]
    assert list(task.other_conditions(task.condition(batch), batch)) == ["semantic_drop"]
    task.losses(batch, draw_of(batch))["loss"].sum().backward()
    task.held_out(batch, draw_of(batch))


def test_unconditional_means_an_empty_caption_and_zeros():
    batch = make_batch(length=LENGTH)
    task = stage_c(clip=True)
    cond = task.condition(batch, draw_of(batch))
    null = task.unconditional(cond)
    assert null.present().keys() == task.unconditional(null).present().keys()
    assert not null.image_embedding.any() and (null.text_pooled == 49).all() and (null.mask.sum(1) == 1).all()
    pooled_only = stage_b(text=replace(OWN_TEXT, enc_attn_dim=0), pooled_width=EMBED)
    pooled_only.companions[TEXT_CLIP] = Texts()
    cond = pooled_only.condition(batch)
    assert cond.text_states is None and cond.text_pooled.shape == (4, EMBED)
    null = pooled_only.unconditional(cond)
    assert not null.semantic.any() and (null.text_pooled == 49).all() and null.text_states is None
    own = stage_b()
    null = own.unconditional(own.condition(make_batch()))
    assert not null.semantic.any() and (null.mask.sum(1) == 1).all()


# --------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("make", [stage_b, stage_c])
def test_the_loss_is_the_weighted_error_at_the_drawn_times(make):
    """The noise is the process's own, so offset and pyramid noise arrive."""
    for diffusion in (LogSnrConfig(), LogSnrConfig(pyramid_noise=0.75, offset_noise=0.3)):
        task, batch = make(diffusion, text_dropout=0.0), make_batch()
        if make is stage_b:
            task.config = replace(task.config, semantic_dropout=0.0)
        draw = draw_of(batch)
        named = task.losses(batch, draw)
        x, cond = task.latents(batch), task.condition(batch, draw)
        t = task.process.training_times(draw.uniform("timestep"))
        noise = task.process.noise(draw.normal, x.shape[1:])
        terms = task.process.training_losses(task.model, x, t, {"cond": cond}, noise)
        assert_close(named["mse"], terms["mse"])
        assert_close(named["loss"], terms["mse"] * task.process.loss_weight(task.process.log_snr(t)))
        assert_close(named["log_snr"], task.process.log_snr(t).float())
        quarters = torch.stack([named[f"mse_q{q}"] for q in range(4)])
        assert torch.equal((~quarters.isnan()).long().argmax(0), (4 * t).long().clamp(max=3))
        assert ((~quarters.isnan()).sum(0) == 1).all()


def test_adaptive_weights_are_state_of_the_task():
    task, batch = stage_c(LogSnrConfig(loss_weighting=("adaptive",))), make_batch()
    assert task.observed == ("log_snr", "observed_mse")
    named = task.losses(batch, draw_of(batch))
    assert_close(named["loss"], named["mse"])  # 1 / 1 before the first update
    for _ in range(200):
        task.observe({name: named[name].detach() for name in task.observed})
    later = task.losses(batch, draw_of(batch))
    assert_close(later["mse"], named["mse"])
    ratio = later["loss"] * named["mse"]  # ≈ mse² / bucket
    assert not torch.allclose(later["loss"], named["loss"]) and ratio.isfinite().all()
    assert_close(later["loss"], torch.ones(4), rtol=0.3, atol=0)  # the weight is 1 / the usual error
    assert stage_c().extra_state() == {}


def test_held_out_losses_are_unweighted_and_say_what_is_used():
    batch = make_batch(range(6))
    task = stage_b(LogSnrConfig(loss_weighting=("snr",)), text_dropout=1.0, semantic_dropout=1.0)
    draw = draw_of(batch)
    values = task.held_out(batch, draw)
    x, cond = task.latents(batch), task.condition(batch)
    t = task.process.training_times(draw.uniform("timestep"))
    noise = task.process.noise(draw.normal, x.shape[1:])

    def mse(cond):
        return task.process.training_losses(task.model, x, t, {"cond": cond}, noise)["mse"]

    assert_close(values["loss"], mse(cond))
    without = replace(cond, semantic=torch.zeros_like(cond.semantic))
    assert_close(values["semantic_drop_gap"], mse(without) - mse(cond))
    tokens, mask = cond.tokens.roll(1, 0), cond.mask.roll(1, 0)
    swapped = replace(cond, tokens=tokens, mask=mask)
    assert_close(values["caption_swap_gap"], mse(swapped) - mse(cond))
    bins = {name: value for name, value in values.items() if name.startswith("loss_log_snr_")}
    assert list(bins) == [f"loss_log_snr_{center}" for center in range(-9, 10, 2)]
    log_snr = task.process.log_snr(t)
    for center in range(-9, 10, 2):
        inside = (log_snr >= center - 1) & (log_snr < center + 1)
        assert torch.equal(~bins[f"loss_log_snr_{center}"].isnan(), inside)


# ------------------------------------------------------------------------------------------------------------- previews


def previews_of(task, batch, size=8) -> LatentPreviews:
    decoder, scale = (STAGE_A, 4) if isinstance(task, StageBTask) else (SEMANTIC, 8)
    network = task.companions[decoder]
    decode = network.decode if decoder == STAGE_A else network.preview
    signal = LatentSignal(task.model.config.channels, scale, decoder, network.encode, decode)
    captions = [f"caption {position}" for position in batch.index.tolist()]
    return LatentPreviews(batch, captions, signal, LatentSampling(steps=2, guidance_scale=2.0), size)


def row_of(grid, row, count) -> list[np.ndarray]:
    """The pictures of 96 pixels in a row of a grid without captions."""
    return [grid[4 + 100 * row : 100 + 100 * row, 4 + 100 * i : 100 + 100 * i] for i in range(count)]


@pytest.mark.parametrize("make", [stage_b, stage_c])
def test_previews_show_each_image_from_the_original_to_a_sample(make, monkeypatch):
    """In a grid and in a table with captions, whatever is sampled together."""
    task, batch = make().eval(), make_batch(range(3), size=(96, 96))
    monkeypatch.setattr(task, "pictures", lambda batch, cond: {"control": -batch.images})
    with torch.no_grad():
        shown, pieces = (previews_of(task, batch, size)(task) for size in (8, 2))
    grid, columns = shown["samples"], shown["samples_table"].columns
    assert grid.shape == (6 * 100 + 4, 3 * 100 + 4, 3)
    assert np.abs(grid.astype(int) - pieces["samples"]).max() <= 1
    rows = [row_of(grid, row, 3) for row in range(6)]
    original = ((batch.images[1].permute(1, 2, 0) + 1) * 127.5).round().numpy().astype(np.uint8)
    assert np.array_equal(rows[0][1], original)
    for one, other in itertools.pairwise(rows):
        assert not np.array_equal(one, other)
    assert list(columns) == ["caption", "sampled", "control", "original"]
    assert columns["caption"] == ["caption 0", "caption 1", "caption 2"]
    for name, row in {"original": 0, "control": 1, "sampled": 5}.items():
        assert np.array_equal(columns[name], rows[row])


def test_previews_are_noised_from_little_to_much_and_sampled_with_the_shift(monkeypatch):
    task, batch, times = stage_c(), make_batch(range(4), size=(96, 96)), []
    q_sample = task.process.q_sample
    monkeypatch.setattr(task.process, "q_sample", lambda x, t, *rest: times.extend(t.tolist()) or q_sample(x, t, *rest))
    shown = previews_of(task, batch)
    other = replace(shown, sampling=replace(shown.sampling, shift=5.0))
    with torch.no_grad():
        grids = [previews(task)["samples"] for previews in (shown, other)]
    assert times == 2 * [0.125, 0.375, 0.625, 0.875]
    samples = 4 + 4 * 100  # where the last row begins
    assert np.array_equal(*(grid[:samples] for grid in grids)) and not np.array_equal(*grids)


def test_previews_show_samples_of_both_weights():
    task, batch = stage_c(), make_batch(range(2), size=(96, 96))
    task.eval()
    entered = []

    @contextlib.contextmanager
    def others():
        entered.append(1)
        with torch.no_grad():
            task.model.out_conv.weight.neg_()
        yield
        with torch.no_grad():
            task.model.out_conv.weight.neg_()

    task.unaveraged = others
    with torch.no_grad():
        shown = previews_of(task, batch)(task)
    grid, columns = shown["samples"], shown["samples_table"].columns
    assert grid.shape[0] == 6 * 100 + 4 and entered == [1]
    assert list(columns) == ["caption", "sampled", "sampled with EMA", "original"]
    assert np.array_equal(columns["sampled with EMA"], row_of(grid, 4, 2))  # they are in place in previews
    assert np.array_equal(columns["sampled"], row_of(grid, 5, 2))
    rows = [grid[4 + row * 100 : 100 + row * 100] for row in range(6)]
    assert not np.array_equal(rows[4], rows[5])


def test_guidance_of_previews_needs_something_to_drop():
    task, batch = stage_b(text=replace(OWN_TEXT, enc_attn_dim=0)), make_batch(range(2))
    with torch.no_grad():
        guided = previews_of(task, batch)
        plain = replace(guided, sampling=replace(guided.sampling, guidance_scale=1.0))
        assert not np.array_equal(guided(task)["samples"], plain(task)["samples"])
