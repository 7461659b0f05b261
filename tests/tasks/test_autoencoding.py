"""Training stage A and the semantic encoder: losses, parts, and what is updated between steps."""

import numpy as np
import pytest
import torch
from refusing import refused
from torch.testing import assert_close

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion.augmentation import area_downsample
from diff_dalle.models.latent.discriminator import Discriminator, DiscriminatorConfig
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stage_a import StageA, StageAConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks.autoencoding import DISCRIMINATOR, AutoencodingConfig, AutoencodingTask
from diff_dalle.tasks.semantic import (
    SemanticTask,
    SemanticTaskConfig,
    calibration_rate,
    follow,
    preview_error,
    sample_moments,
    usable,
)

A = StageAConfig(width=8, bottleneck_blocks=1, codebook_size=16)
S = SemanticConfig(stride=8, encoder_width=4, encoder_blocks=1, previewer_width=8)


def draw_of(batch):
    return Draw(0, batch.index)


def make_batch(positions=range(6), size=(16, 24)) -> Batch:
    index = torch.tensor(list(positions))
    images = torch.tanh(Draw(5, index).normal("image", (3, *size)))
    return Batch(images, Conditioning(), index)


def make_task(**settings) -> AutoencodingTask:
    torch.manual_seed(0)
    discriminator = None
    if settings.setdefault("adversarial_weight", 0.0):
        discriminator = Discriminator(DiscriminatorConfig(discriminator_depth=2, discriminator_width=16))
    perceptual = settings.pop("perceptual", None)
    config = AutoencodingConfig(**settings)
    return AutoencodingTask(StageA(A), config, discriminator, seed=3, perceptual=perceptual)


def step(task, batch=None) -> dict[str, torch.Tensor]:
    """What a step observes, passed on."""
    batch = batch or make_batch()
    losses = task.losses(batch, draw_of(batch))
    task.observe({name: losses[name].detach() for name in task.observed})
    return losses


def test_the_loss_is_the_weighted_sum_of_what_is_reported():
    weights = {
        "l1_weight": 2.0,
        "l2_weight": 0.5,
        "codebook_weight": 3.0,
        "commitment_weight": 0.7,
        "lpips_weight": 4.0,
    }
    task = make_task(**weights, perceptual=lambda real, ours: (real - ours).flatten(1).std(1), quantized_share=0.0)
    batch = make_batch()
    named = task.losses(batch, draw_of(batch))
    reconstruction = task.model(batch.images)
    error = reconstruction.images - batch.images
    assert_close(named["l1"], error.abs().flatten(1).mean(1))
    assert_close(named["l2"], error.square().flatten(1).mean(1))
    assert_close(named["lpips"], error.flatten(1).std(1))
    assert torch.equal(named["codebook"], reconstruction.codebook_loss)
    names = ("l1", "l2", "codebook", "commitment", "lpips")
    assert_close(named["loss"], sum(w * named[name] for w, name in zip(weights.values(), names, strict=True)))


def test_a_share_of_the_samples_is_decoded_from_quantized_latents():
    batch = make_batch(range(40))
    shares = {}
    for share in (0.0, 0.3, 1.0):
        task, shown = make_task(quantized_share=share), []
        task.model.register_forward_pre_hook(lambda module, given, shown=shown: shown.append(given[1]))
        task.losses(batch, draw_of(batch))
        shares[share] = shown[0].float().mean().item()
    assert shares[0.0] == 0 and shares[1.0] == 1 and 0.1 < shares[0.3] < 0.5


def test_the_discriminator_sees_the_reconstructions_that_are_trained():
    """Those from quantized latents included, in the same share of the samples."""
    task, batch, shown = make_task(adversarial_weight=0.1, adversarial_start=0, quantized_share=0.5), make_batch(), []
    task.model.register_forward_pre_hook(lambda module, given: shown.append(given[1]))
    for part in task.parts:
        task(batch, draw_of(batch), part)
    assert torch.equal(*shown) and 0 < shown[0].sum() < len(batch)


def test_each_part_has_gradients_of_its_own_only():
    task = make_task(adversarial_weight=0.1, adversarial_start=0)
    assert task.parts == ("", DISCRIMINATOR) and make_task().parts == ("",)
    assert list(task.part_modules(DISCRIMINATOR)) == [DISCRIMINATOR] and list(task.part_modules("")) == ["model"]
    batch = make_batch()
    for part, own, other in (("", task.model, task.discriminator), (DISCRIMINATOR, task.discriminator, task.model)):
        task.zero_grad()
        other.requires_grad_(False)
        task(batch, draw_of(batch), part)["loss"].sum().backward()
        other.requires_grad_(True)
        assert all(p.grad is not None for p in own.parameters()), part
        assert not any(p.grad is not None for p in other.parameters()), part


def test_the_adversary_begins_at_its_start():
    task = make_task(adversarial_weight=10.0, adversarial_start=2)
    batch = make_batch()
    draw = draw_of(batch)
    for _ in range(2):
        assert task.losses(batch, draw)["adversarial"].isnan().all()
        early = task(batch, draw, DISCRIMINATOR)["loss"]
        early.sum().backward()
        assert not early.any() and not any(p.grad.any() for p in task.discriminator.parameters())
        step(task)
    named = task.losses(batch, draw)
    rest = named["l1"] + named["l2"] + named["codebook"] + 0.25 * named["commitment"]
    assert_close(named["loss"], rest + 10 * named["adversarial"])
    assert task(batch, draw, DISCRIMINATOR)["loss"].all()


def test_the_power_method_goes_on_after_each_update_of_the_discriminator():
    task = make_task(adversarial_weight=1.0, adversarial_start=1)
    with torch.no_grad():
        for parameter in task.discriminator.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    before = [conv.direction.clone() for conv in task.discriminator.convs]
    step(task)
    assert all(torch.equal(a, b.direction) for a, b in zip(before, task.discriminator.convs, strict=True))
    step(task)
    assert not any(torch.equal(a, b.direction) for a, b in zip(before, task.discriminator.convs, strict=True))


def test_unused_entries_of_the_codebook_are_revived_at_the_interval():
    task = make_task(revival_interval=2, revival_usage=0.999)
    book = task.model.quantizer.codebook.weight
    before = book.detach().clone()
    step(task)
    assert torch.equal(book, before)
    named = step(task)
    moved = (book != before).any(1)
    candidates = named["candidates"]
    assert 0 < moved.sum() <= len(candidates)
    for entry in book[moved]:
        assert (entry == candidates).all(1).any()
    other = make_task(revival_interval=2, revival_usage=0.999)
    other.seed = 4
    step(other)
    step(other)
    assert not torch.equal(other.model.quantizer.codebook.weight, book)  # which candidates depends on the seed
    never = make_task(revival_interval=0, revival_usage=0.999)
    for _ in range(4):
        step(never)
    assert torch.equal(never.model.quantizer.codebook.weight, before)


def test_the_scale_factor_follows_the_latents():
    task = make_task()
    with torch.no_grad():
        task.model.norm.weight.mul_(3.7)
        task.model.norm.bias.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
    for i in range(40):
        step(task, make_batch(range(6 * i, 6 * i + 6)))
    latents = task.model.encode(make_batch(range(60)).images)
    assert latents.std().item() == pytest.approx(1, abs=0.05)


def test_the_statistics_of_the_norm_follow_the_batch():
    task = make_task()
    mean = task.model.norm.running_mean.clone()
    named = step(task)
    assert_close(task.model.norm.running_mean, named["norm_moments"][:, :4].mean(0))
    assert not torch.equal(mean, task.model.norm.running_mean)


def test_values_that_are_not_finite_change_no_statistic():
    task = make_task(revival_interval=1, revival_usage=0.5)
    step(task)
    kept = {name: buffer.clone() for name, buffer in task.model.named_buffers() if "usage" not in name}
    named = task.losses(make_batch(), Draw(0, make_batch().index))
    bad = {"norm_moments": named["norm_moments"].detach() * torch.nan}
    task.observe({**bad, "counts": named["counts"], "candidates": named["candidates"] * torch.nan})
    assert all(torch.equal(value, task.model.get_buffer(name)) for name, value in kept.items())
    assert all(value.isfinite().all() for value in task.model.state_dict().values())


def test_held_out_reconstructions_are_measured():
    task, batch = make_task(revival_usage=0.5), make_batch()
    task.model.quantizer.usage.copy_(torch.arange(16) % 4)
    values = task.held_out(batch, draw_of(batch))
    assert values["codebook_use"].tolist() == [0.75] * 6
    with torch.no_grad():
        error = task.model(batch.images).images.clamp(-1, 1) - batch.images
    psnr = -10 * torch.log10(error.square().flatten(1).mean(1) / 4)
    assert_close(values["psnr"], psnr, rtol=0, atol=0.05)  # before rounding to levels
    assert (values["quantized_psnr"] != values["psnr"]).any() and values["ssim"].abs().max() < 0.9
    means = {name: value.mean().item() for name, value in values.items()}
    text, figures = task.findings({**means, "latent_mean": 0.5, "latent_square": 1.25})
    assert "75.0% of the codebook in use; latents: mean 0.500, standard deviation 1.000" in text and not figures
    small = make_batch(size=(8, 8))
    values = task.held_out(small, Draw(0, small.index))
    assert "ssim" not in values
    task.findings({name: value.mean().item() for name, value in values.items()})


def test_previews_are_originals_above_reconstructions():
    task = make_task()
    assert task.previews() == {}
    task.shown = make_batch(range(3), size=(96, 96)).images
    with torch.no_grad():
        grid = task.previews()["reconstructions"]
        plain = task.model(task.shown[1:2]).images
    assert grid.shape == (3 * 100 + 4, 3 * 100 + 4, 3)
    cells = [grid[4 + row * 100 : 100 + row * 100, 104:200] for row in range(3)]
    levels = ((task.shown[1].permute(1, 2, 0) + 1) * 127.5).round().numpy()
    assert np.array_equal(cells[0], levels.astype(np.uint8))
    expected = ((plain[0].clamp(-1, 1).permute(1, 2, 0) + 1) * 127.5).round().numpy().astype(np.uint8)
    assert np.array_equal(cells[1], expected) and not np.array_equal(cells[1], cells[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"l1_weight": -1.0}, "l1_weight is -1, but must be at least 0"),
        ({"quantized_share": 1.5}, r"quantized_share is 1\.5, but must be at least 0 and at most 1"),
        ({"l1_weight": 0.0, "l2_weight": 0.0}, "l1_weight is 0, but must be above 0 where l2_weight is 0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with refused(message):
        AutoencodingConfig(**settings)


# ---------------------------------------------------------------------------------------------------- semantic encoder


def make_semantic(latent_noise: float = 0.0) -> SemanticTask:
    torch.manual_seed(0)
    return SemanticTask(SemanticAutoencoder(S), SemanticTaskConfig(latent_noise))


def test_previews_are_compared_with_small_images():
    torch.manual_seed(0)
    config = SemanticConfig(stride=16, encoder_width=4, encoder_blocks=1, previewer_width=8)
    task = SemanticTask(SemanticAutoencoder(config), SemanticTaskConfig())
    batch = make_batch(size=(32, 64))
    named = task.losses(batch, draw_of(batch))
    previews = task.model(batch.images)
    assert previews.shape[2:] == (16, 32)
    error = previews - area_downsample(batch.images, 2)
    assert_close(named["loss"], error.square().flatten(1).mean(1))


def test_latents_get_mean_0_and_standard_deviation_1_in_each_channel():
    task = make_semantic()
    batch = make_batch(range(12), size=(32, 32))
    for _ in range(30):
        step(task, batch)
    latents = task.model.encode(batch.images)
    assert latents.mean((0, 2, 3)).abs().max() < 0.02 and (latents.std((0, 2, 3)) - 1).abs().max() < 0.05
    preview, values = task.model(batch.images), task.held_out(batch, draw_of(batch))
    assert values["latent_mean"].mean().abs() < 0.05 and values["psnr"].isfinite().all()
    assert_close(preview, task.model.preview(latents))
    assert "standard deviation" in task.findings({name: v.mean().item() for name, v in values.items()})[0]


def test_later_batches_move_mean_and_deviation_less():
    """The second by half of what it finds, so that both count evenly."""
    model = make_semantic().model
    follow(model, {"norm_moments": moments(mean=2.0, variance=9.0)}, 1)
    assert (model.norm.running_mean == 2).all() and (model.norm.running_var == 9).all()
    assert (model.latent_mean == 0).all() and (model.latent_std - 1).abs().max() < 1e-5
    follow(model, {"norm_moments": moments(mean=4.0, variance=25.0)}, 2)
    # The norm is then at mean 3 and variance 17, where the batch has mean 1 / √17 and deviation 5 / √17.
    assert_close(model.latent_mean, torch.full((16,), 0.5 / 17**0.5))
    assert_close(model.latent_std, torch.full((16,), (1 + 5 / 17**0.5) / 2))


def moments(mean: float, variance: float) -> torch.Tensor:
    """Of two samples with 16 channels."""
    return torch.tensor([[mean] * 16 + [variance] * 16]).repeat(2, 1)


def test_the_first_batch_is_normalized_at_once():
    """Mean and deviation are those of latents by the norm's present statistics, not by its former ones."""
    task, batch = make_semantic(), make_batch(range(12), size=(32, 32))
    step(task, batch)
    latents = task.model.encode(batch.images)
    assert latents.mean((0, 2, 3)).abs().max() < 1e-4
    assert_close(latents.std((0, 2, 3), correction=0), torch.ones(16), rtol=1e-4, atol=1e-4)
    task = make_task()
    with torch.no_grad():
        task.model.norm.weight.copy_(torch.tensor([3.0, 0.5, 1.0, 2.0]))
        task.model.norm.bias.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
    step(task)
    assert task.model.encode(make_batch().images).std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_noise_is_added_to_the_latents_that_are_decoded():
    task, batch = make_semantic(latent_noise=0.5), make_batch(range(6), size=(32, 64))
    found = task.losses(batch, draw_of(batch))
    latents = task.model.encode(batch.images)
    noise = 0.5 * draw_of(batch).normal("latent noise", latents.shape[1:])
    assert_close(found["loss"], preview_error(task.model.preview(latents + noise), batch.images))
    plain = make_semantic().losses(batch, draw_of(batch))
    assert not torch.equal(found["loss"], plain["loss"])
    # The statistics that the latents are normalized by, and the held-out errors, are those without noise.
    assert torch.equal(found["norm_moments"], plain["norm_moments"])
    draw = draw_of(batch)
    assert torch.equal(task.held_out(batch, draw)["loss"], make_semantic().held_out(batch, draw)["loss"])
    with refused(r"latent_noise is -0\.1, but must be at least 0"):
        SemanticTaskConfig(latent_noise=-0.1)


def test_previews_of_a_semantic_encoder_are_shown_below_small_originals():
    task = make_semantic()
    assert task.previews() == {}
    task.shown = make_batch(range(2), size=(32, 32)).images
    with torch.no_grad():
        assert task.previews()["previews"].shape == (2 * 100 + 4, 2 * 100 + 4, 3)


# --------------------------------------------------------------------------------------------------------- calibration


def test_moments_of_samples_make_those_of_the_batch():
    latents = torch.randn(5, 3, 7) * 2 + 3
    mean, square = sample_moments(latents).mean(0)
    assert_close(mean, latents.mean())
    assert_close((square - mean**2).sqrt(), latents.std(correction=0))


def test_statistics_that_cannot_be_used_are_0_and_1():
    nan = torch.tensor([2.0, torch.nan, torch.inf, 5.0, 7.0]), torch.tensor([3.0, 4.0, 1.0, torch.nan, 0.0])
    mean, std = usable(*nan)
    assert mean.tolist() == [2, 0, 0, 0, 0] and std.tolist() == [3, 1, 1, 1, 1]


def test_later_steps_calibrate_less():
    assert [calibration_rate(n) for n in (1, 2, 1000)] == [1, 0.5, 0.01]
