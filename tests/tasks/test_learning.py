"""Networks learn what they are trained for, within a hundred steps or so."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_decoding
import torch
from decoder_making import UNET, make_decoder
from network_making import VOCABULARY, make_generator
from test_latent_task import OWN_TEXT, SHAPE, draw_of, make_batch
from torch import nn
from torch.nn import functional

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import GuidanceConfig, LogSnrConfig, LogSnrProcess
from diff_dalle.diffusion.editing import Edit, EditConfig
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.images.signal import PixelSignal
from diff_dalle.models.latent.stages import StageB, StageBConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks.decoding import DecodingTask
from diff_dalle.tasks.latent import SEMANTIC, STAGE_A, StageBTask, StageBTaskConfig


class Averages(nn.Module):
    """An encoder whose latents are the colors of squares."""

    def __init__(self, stride: int, channels: int):
        super().__init__()
        self.config, self.channels = SimpleNamespace(stride=stride, semantic_channels=channels), channels

    def encode(self, images):
        return functional.avg_pool2d(images, self.config.stride).repeat(1, 6, 1, 1)[:, : self.channels]


def test_stage_b_learns_to_use_its_map():
    """On held-out pictures of random squares, its error with the map is far below that with a zero map."""

    def pictures(positions) -> Batch:
        colors = Draw(5, torch.tensor(list(positions))).normal("colors", (3, 2, 2)).sign()
        return replace(make_batch(positions), images=functional.interpolate(colors, (16, 16)))

    torch.manual_seed(0)
    wordless = replace(OWN_TEXT, enc_attn_dim=0)
    config = StageBConfig(**{**SHAPE, "widths": (32, 32)}, text=wordless, pooled_width=0, pixel_channels=0)
    task = StageBTask(StageB(config, VOCABULARY), LogSnrProcess(), StageBTaskConfig(semantic_scale=(1.0, 1.0)))
    task.add_companion(STAGE_A, Averages(4, config.channels))
    task.add_companion(SEMANTIC, Averages(8, config.semantic_channels))
    optimizer = torch.optim.Adam(task.model.parameters(), 3e-3)
    for step in range(150):
        batch = pictures(range(16 * step, 16 * step + 16))
        optimizer.zero_grad()
        task.losses(batch, draw_of(batch))["loss"].mean().backward()
        optimizer.step()
    held_out = pictures(range(10**6, 10**6 + 64))
    with torch.no_grad():
        values = task.held_out(held_out, draw_of(held_out))
    assert values["semantic_drop_gap"].mean() > 0.25 * values["loss"].mean()


@pytest.mark.slow
def test_a_decoder_learns_its_target():
    """A few steps on one batch: the loss of eps, x_start and v falls, with a learned variance and self-conditioning."""
    for settings in ({}, {"predict_x_start": (True,)}, {"predict_v": (True,), "loss_type": ("huber",)}):
        decoder = make_decoder(unet=replace(UNET, self_cond=True), **settings)
        torch.manual_seed(0)
        task = DecodingTask(decoder.stage(0).build(), decoder.stage(0))
        optimizer, batch = torch.optim.Adam(task.parameters(), 6e-3), test_decoding.make_batch(16, 8)
        losses = []
        for _ in range(15):
            loss = task.losses(batch, test_decoding.draw_of(batch))["loss"].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.7 * losses[0]


class Network(nn.Module):
    """A tiny generator whose time input is continuous."""

    def __init__(self):
        super().__init__()
        self.generator = make_generator(TextEncoderConfig(enc_attn_dim=0), num_classes=2)

    def encode_text(self, cond):
        return self.generator.encode_text(cond)

    def forward(self, x, t, cond):
        return self.generator(x, 1000 * t, cond)


@pytest.mark.slow
def test_a_network_in_log_snr_learns_and_samples():
    """Two uniform images by class: after a few steps the loss has dropped, and guided samples and edits are finite."""
    process, network = LogSnrProcess(LogSnrConfig(prediction="v")), Network()
    labels = torch.arange(8) % 2
    x_start = (labels * 1.0 - 0.5)[:, None, None, None].expand(8, 3, 16, 16)
    optimizer, generator = torch.optim.Adam(network.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(30):
        t, noise = torch.rand(8, generator=generator), torch.randn(x_start.shape, generator=generator)
        loss = process.training_losses(network, x_start, t, {"cond": Conditioning(labels=labels)}, noise)["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])

    cond, null = Conditioning(labels=labels[:2]), Conditioning(labels=torch.full((2,), 2))
    batch = SampleBatch(PixelSignal(), (16, 16), [0, 1], cond, null)
    unknown = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    unknown[..., :8] = False
    edits = (None, Edit(x_start[:2], None, EditConfig(strength=0.5)), Edit(x_start[:2], unknown))
    for edit in (*edits, Edit(x_start[:2], None, EditConfig(variation=0.3))):
        guidance = GuidanceConfig(guidance_scale=2.0)
        x = sample_batch(network, process.steps(5), replace(batch, edit=edit), SamplerConfig("ddim"), guidance)
        assert x.shape == (2, 3, 16, 16) and x.isfinite().all() and x.abs().max() > 0.05
        if edit is not None and edit.unknown is not None:
            assert torch.equal(x[..., :8], x_start[:2, ..., :8])
