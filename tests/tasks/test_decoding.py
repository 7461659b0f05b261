"""Training a decoder's U-Net: its own pictures, low-resolution images, embeddings, dropping, self-conditioning."""

from dataclasses import replace

import pytest
import torch
from decoder_making import TEXT_LENGTH, TEXT_UNET, TEXT_WIDTH, UNET, WIDTH, make_decoder, make_network
from network_making import seeded
from refusing import refused
from torch import nn
from torch.testing import assert_close

from diff_dalle.batch import SELF_COND, Batch, Conditioning
from diff_dalle.diffusion.augmentation import area_downsample
from diff_dalle.models.precision import autocast
from diff_dalle.randomness import Draw
from diff_dalle.tasks.decoding import CLIP, DecodingTask

PLAIN = {"blur_sigma": (0.0,)}  # low-resolution images as they are


class Watcher(nn.Module):
    """Predicts ``answer`` times its input, and records what it is shown."""

    def __init__(self, answer=0.5):
        super().__init__()
        self.answer, self.shown = nn.Parameter(torch.tensor(answer)), []

    def forward(self, x, t, cond):
        self.shown.append((x, t, cond))
        return self.answer * x


class Encoder(nn.Module):
    """A CLIP whose embeddings say what it was shown: the means of the picture's quarters and corners."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def encode_images(self, images):
        self.seen.append(images)
        return images.mean((2, 3)).repeat(1, 2)

    def encode_tokens(self, tokens, mask):
        return tokens[:, :WIDTH].float(), tokens[:, :, None].float().expand(-1, -1, TEXT_WIDTH) + 1


def make_task(i=0, count=1, network=None, **settings):
    settings = {"learned_variance": (False,), **settings}
    decoder = make_decoder(count, **settings)
    return DecodingTask(Watcher() if network is None else network, decoder.stage(i))


def make_batch(n=6, side=16, start=0, **cond):
    """Pictures with large and small structure, and an embedding of each."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, side // 4, side // 4, generator=generator) - 0.5
    images = coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)
    images = images + 0.3 * torch.rand(n, 3, side, side, generator=generator)
    fields = {"image_embedding": torch.randn(n, WIDTH, generator=generator), **cond}
    given = {name: value for name, value in fields.items() if value is not None}
    return Batch(images, Conditioning(**given), torch.arange(start, start + n))


def texts(n=6):
    states = seeded(n, TEXT_LENGTH, TEXT_WIDTH, seed=1)
    return {"text_states": states, "mask": torch.ones(n, TEXT_LENGTH, dtype=torch.bool)}


def draw_of(batch, seed=0):
    return Draw(seed, batch.index)


def own(task, batch, crop=0, seed=0):
    return task.own_batch(batch, draw_of(batch, seed), crop)


# ---------------------------------------------------------------------------------------------------- its own pictures


@pytest.mark.parametrize("i", [0, 1, 2])
def test_each_unet_gets_its_own_pictures_from_the_same_batch(i):
    """After an area filter, never by picking pixels: stripes become gray."""
    batch, side = make_batch(side=32), 8 * 2**i
    found = own(make_task(i, 3, **PLAIN), batch)
    assert_close(found.images, area_downsample(batch.images, 32 // side))
    if i:
        assert_close(found.cond.low_res, area_downsample(batch.images, 64 // side))
        assert found.cond.low_res_level.tolist() == found.cond.low_res_blur.tolist() == [0] * 6
        assert found.cond.image_embedding is None
    else:
        assert found.cond.low_res is None and torch.equal(found.cond.image_embedding, batch.cond.image_embedding)
    stripes = Batch(torch.tensor([1.0, -1.0]).repeat(16).expand(1, 3, 32, 32), batch.cond.select([0]), batch.index[:1])
    if i < 2:
        assert own(make_task(i, 3, **PLAIN), stripes).images.abs().max() < 1e-6


def test_pictures_need_not_be_a_multiple():
    batch = make_batch(side=28)
    found = own(make_task(), batch).images
    assert_close(found.mean((2, 3)), batch.images.mean((2, 3)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(own(make_task(), batch).images, found)


def test_low_resolution_images_at_the_own_size():
    """Without downsampling first, the image itself is blurred."""
    batch = make_batch()
    found = own(make_task(1, 2, lowres_downsample_first=False, **PLAIN), batch)
    assert torch.equal(found.cond.low_res, found.images)
    blurred = own(make_task(1, 2, lowres_downsample_first=False, blur_prob=1.0), batch)
    assert blurred.cond.low_res.shape == (6, 3, 16, 16) and not torch.equal(blurred.cond.low_res, blurred.images)


def test_blur_and_noise_are_drawn_for_each_sample():
    task = make_task(1, 2, use_noise_for_lowres_cond=(True,), blur_sigma=(0.2, 0.8))
    batch = make_batch(800, 16)
    cond = own(task, batch).cond
    assert (cond.low_res_blur > 0).float().mean() == pytest.approx(0.5, abs=0.06)
    assert cond.low_res_level.min() < 0.02 and cond.low_res_level.max() > 0.98
    again = own(task, batch.select(torch.arange(700, 720))).cond
    assert torch.equal(again.low_res, cond.low_res[700:720]) and torch.equal(
        again.low_res_level, cond.low_res_level[700:720]
    )


@pytest.mark.parametrize("first", [True, False])
def test_crops_are_the_same_part_of_both_images(first):
    batch = make_batch(40, 32)
    task = make_task(2, 3, random_crop_sizes=(8,), lowres_downsample_first=first, **PLAIN)
    whole, part = own(task, batch), own(task, batch, 8)
    small = 4 if first else 8
    assert part.images.shape == (40, 3, 8, 8) and part.cond.low_res.shape == (40, 3, small, small)
    corners = set()
    for n in range(40):
        places = whole.images[n].unfold(1, 8, 1).unfold(2, 8, 1)  # [3, 25, 25, 8, 8]
        ((top, left),) = (places == part.images[n][:, None, None]).all(-1).all(-1).all(0).nonzero().tolist()
        y, x = (top // 2, left // 2) if first else (top, left)
        assert torch.equal(whole.cond.low_res[n, :, y : y + small, x : x + small], part.cond.low_res[n])
        assert top % 2 == left % 2 == 0
        corners.add((top, left))
    tops, lefts = ({corner[axis] for corner in corners} for axis in (0, 1))
    assert len(corners) > 30 and {0, 24} <= tops and {0, 24} <= lefts
    task.losses(batch, draw_of(batch))
    assert task.model.shown[-1][0].shape[2:] == (8, 8)
    task.held_out(batch, draw_of(batch))
    assert task.model.shown[-1][0].shape[2:] == (32, 32)  # whole images


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 4, 4), "the pictures have 4×4 pixels, but unet0 is trained on 8×8: load them square and at"),
        (torch.zeros(2, 3, 16, 24), "the pictures have 24×16 pixels"),
    ],
)
def test_pictures_that_do_not_do_are_named(images, message):
    with refused(message):
        own(make_task(), Batch(images, make_batch(2).cond, torch.arange(2)))


# ----------------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_come_from_the_batch_or_from_a_clip():
    """The CLIP sees the whole pictures, not the smaller or cropped ones that the U-Net is trained on."""
    batch, clip = make_batch(side=32, image_embedding=None), Encoder()
    every = (replace(UNET, cond_on_image_embeds=True),) * 2
    task = make_task(1, 2, unets=every, random_crop_sizes=(8,))
    with refused("unet1 is conditioned on image embeddings, but the samples have none and"):
        own(task, batch)
    task.add_companion(CLIP, clip)
    found = own(task, batch, 8).cond.image_embedding
    assert clip.seen[0] is batch.images and torch.equal(found, batch.images.mean((2, 3)).repeat(1, 2))
    given = make_batch()
    assert torch.equal(own(task, given, 8).cond.image_embedding, given.cond.image_embedding) and len(clip.seen) == 1
    assert own(make_task(unconditional=True), batch).cond.present() == {}
    assert CLIP not in dict(task.named_modules())


def test_texts_come_from_the_batch_or_from_a_clip():
    task, given = make_task(unet=TEXT_UNET), texts()
    cond = own(task, make_batch(**given)).cond
    assert torch.equal(cond.text_states, given["text_states"]) and torch.equal(cond.mask, given["mask"])
    tokens = torch.arange(6 * TEXT_LENGTH).view(6, TEXT_LENGTH)
    captions = make_batch(tokens=tokens, mask=given["mask"])
    with refused("unet0 is conditioned on text encodings, but the samples have none"):
        own(task, captions)
    task.add_companion(CLIP, Encoder())
    cond = own(task, captions).cond
    assert torch.equal(cond.text_states, tokens[:, :, None].float().expand(-1, -1, TEXT_WIDTH) + 1)
    assert cond.tokens is None  # they are the CLIP's, not the network's
    with refused("nor captions"):
        own(task, make_batch())
    assert own(make_task(), make_batch(**given)).cond.text_states is None


# ------------------------------------------------------------------------------------------------------------- dropping


def test_image_and_text_are_dropped_independently_with_their_probabilities():
    n = 4000
    task = make_task(unet=TEXT_UNET, image_cond_drop_prob=0.2, text_cond_drop_prob=0.6)
    batch = make_batch(n, 8, **texts(n))
    task.losses(batch, draw_of(batch))
    cond = task.model.shown[0][2]
    image, text = ~cond.embedding_mask, ~cond.mask[:, 1]
    assert image.float().mean() == pytest.approx(0.2, abs=0.025)
    assert text.float().mean() == pytest.approx(0.6, abs=0.03)
    assert (image & text).float().mean() == pytest.approx(0.12, abs=0.02)
    assert torch.equal(cond.image_embedding.abs().sum(1) == 0, image)
    assert torch.equal(cond.text_states.abs().sum((1, 2)) == 0, text)
    t = task.model.shown[0][1].float()
    assert abs(torch.corrcoef(torch.stack([image.float(), t]))[0, 1]) < 0.06


def test_probability_zero_keeps_all_and_evaluation_drops_nothing():
    batch = make_batch(200, 8, **texts(200))
    task = make_task(unet=TEXT_UNET, image_cond_drop_prob=0.0, text_cond_drop_prob=0.0)
    task.losses(batch, draw_of(batch))
    assert task.model.shown[0][2].embedding_mask is None and task.model.shown[0][2].mask.all()
    task = make_task(unet=TEXT_UNET, image_cond_drop_prob=1.0, text_cond_drop_prob=1.0)
    task.held_out(batch, draw_of(batch))
    assert all(cond.embedding_mask is None and cond.mask.all() for _, _, cond in task.model.shown)


# ------------------------------------------------------------------------------------------------------ held-out losses


def test_held_out_losses_are_deterministic_and_measure_the_use_of_conditions():
    decoder = make_decoder(unet=TEXT_UNET)
    task = DecodingTask(make_network(decoder), decoder.stage(0)).eval()
    batch = make_batch(**texts())
    named, again = (task.held_out(batch, draw_of(batch)) for _ in range(2))
    assert named.keys() >= {"loss", "embedding_swap_gap", "text_swap_gap", "embedding_swap_gap_q0"}
    assert all(torch.equal(named[name].nan_to_num(9), again[name].nan_to_num(9)) for name in named)
    assert named["embedding_swap_gap"].abs().min() > 0 and named["text_swap_gap"].abs().min() > 0
    alike = Batch(batch.images, batch.cond.select([0] * 6), batch.index)
    same = task.held_out(alike, draw_of(batch))
    assert same["embedding_swap_gap"].isnan().all() and same["text_swap_gap"].isnan().all()


# ---------------------------------------------------------------------------------------------------- self-conditioning


def selfish(**settings):
    return make_task(unet=replace(UNET, self_cond=True), **settings)


def test_half_of_the_samples_see_what_the_network_predicts():
    """The same x_start that sampling gives it, limited likewise; without gradient, at the same x_t and t."""
    batch = make_batch(600, 8)
    task = selfish(predict_x_start=(True,), predict_v=(False,))
    task.model.answer.data.fill_(3.0)  # predictions beyond the range
    task.losses(batch, draw_of(batch))
    (first_x, first_t, first), (x, t, cond) = task.model.shown
    assert torch.equal(first_x, x) and torch.equal(first_t, t) and SELF_COND not in first.extra
    expected, found = (3 * x).clamp(-1, 1).detach(), cond.extra[SELF_COND]
    seen = (found == expected).flatten(1).all(1)
    assert torch.equal(found[~seen], torch.zeros_like(found[~seen])) and not found.requires_grad
    assert seen.float().mean() == pytest.approx(0.5, abs=0.06)


def test_the_prediction_is_x_start_whatever_the_network_predicts():
    """In evaluation, always."""
    batch = make_batch(4, 8)
    for settings in ({}, {"predict_v": (True,)}, {"clip_denoised": False}):
        task = selfish(**settings).eval()
        task.held_out(batch, draw_of(batch))
        (_, _, first), (x, t, cond) = task.model.shown[:2]
        assert SELF_COND not in first.extra
        expected = task.process.p_mean_variance(
            lambda *_, x=x: 0.5 * x, x, t, clip_denoised="clip_denoised" not in settings
        )
        assert_close(cond.extra[SELF_COND], expected["pred_xstart"])
    assert (cond.extra[SELF_COND].abs() > 1).any()
    plain = make_task()
    plain.losses(batch, draw_of(batch))
    assert len(plain.model.shown) == 1


def test_weights_keep_their_gradient_after_the_pass_without():
    """Under autocast too, which caches the weights that it has cast."""
    decoder = make_decoder(unet=replace(TEXT_UNET, self_cond=True))
    batch, gradients = make_batch(**texts()), []
    for precision in ("fp32", "bf16"):
        task = DecodingTask(make_network(decoder).train(), decoder.stage(0))
        with autocast(precision, torch.device("cpu")):
            task.losses(batch, draw_of(batch))["loss"].sum().backward()
        gradients.append([p.grad for p in task.parameters()])
    for exact, rounded in zip(*gradients, strict=True):
        assert (exact - rounded).norm() <= 0.2 * exact.norm() + 2e-3
    assert torch.stack([each.norm() for each in gradients[0]]).median() > 0.01
