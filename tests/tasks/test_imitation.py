"""Regularization images of which a LoRA predicts what its base predicts."""

from types import SimpleNamespace

import pytest
import torch
from network_making import VOCABULARY, randomize
from torch import nn

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import DiffusionConfig
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.log_snr import LogSnrProcess
from diff_dalle.diffusion.log_snr_config import LogSnrConfig
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.models.adapters.lora import Adapted
from diff_dalle.models.text_encoder import TextEncoder, TextEncoderConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks import imitation
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.tasks.imitation import Imitation
from diff_dalle.tasks.latent import LatentConfig, LatentTask
from diff_dalle.text.trained_tokens import TrainedTokens

HALF = 2  # of a global batch
PRIOR = torch.tensor([False, False, True, True] * 2)


def draw_of(batch):
    return Draw(0, batch.index)


class Network(nn.Module):
    """A prediction that depends on the image, the time and the caption."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 1)
        self.text = TextEncoder(TextEncoderConfig(enc_attn_dim=8, enc_depth=1, enc_heads=2, text_length=5), VOCABULARY)

    def forward(self, x, t, cond):
        said = self.text(cond.tokens, cond.mask)[0].mean((1, 2))
        return self.mix(x) + (said + t / 100)[:, None, None, None]


class Latents(LatentTask):
    """Images as their own latents."""

    def latents(self, batch):
        return batch.images

    def condition(self, batch, draw=None):
        return batch.cond


def make_batch() -> Batch:
    index = torch.arange(len(PRIOR))
    draw = Draw(9, index)
    tokens = torch.stack([draw.uniform(f"token {i}") * VOCABULARY for i in range(5)], 1).long()
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[4, 1:] = False  # an empty caption
    cond = Conditioning(tokens=tokens, mask=mask)
    return Batch(torch.tanh(draw.normal("image", (3, 4, 4))), cond, index)


def make_task(kind: str):
    torch.manual_seed(0)
    tokens = TrainedTokens(
        SimpleNamespace(vocab_size=VOCABULARY), list(range(VOCABULARY)), [[i] for i in range(VOCABULARY)]
    )
    network = Adapted(randomize(Network()), ("mix",), 2, 2.0, tokens)
    if kind == "latent":
        task = Latents(network, LogSnrProcess(LogSnrConfig(prediction="v")), LatentConfig())
    else:
        schedule = {"noise_schedule": "flow"} if kind == "flow" else {"diffusion_steps": 40}
        process = training_process(DiffusionConfig(prediction=kind, **schedule))
        task = DenoisingTask(network, process, DenoisingConfig(caption_dropout=0.5))
    task.imitation = Imitation(network, HALF)
    return task


def imitated(task, batch: Batch) -> torch.Tensor:
    """Regularization images, and those without a caption."""
    dropped = draw_of(batch).uniform("caption dropout") < getattr(task.config, "caption_dropout", 0)
    return PRIOR | dropped | (batch.index == 4)


KINDS = pytest.mark.parametrize("kind", ["v", "eps", "x_start", "previous_x", "flow", "latent"])


@KINDS
def test_before_the_first_update_the_base_is_imitated_exactly(kind):
    """Caption dropout and noise are those of the prediction."""
    task, batch = make_task(kind), make_batch()
    same = imitated(task, batch)
    loss = task.losses(batch, draw_of(batch))["loss"]
    assert torch.equal(loss == 0, same)
    loss[same].sum().backward()
    assert all(not p.grad.any() for p in task.model.parameters())
    task.imitation = None
    plain = task.losses(batch, draw_of(batch))["loss"]
    assert torch.equal(plain[~same], loss[~same]) and (plain[same] > 0).all() and not same.all()


@KINDS
def test_a_cpu_predicts_the_rows_that_are_imitated_and_other_devices_all(kind, monkeypatch):
    """With equal losses."""
    task, batch = make_task(kind), make_batch()
    seen = []
    task.model.base.mix.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    few = task.losses(batch, draw_of(batch))["loss"]
    monkeypatch.setattr(imitation, "predicted_rows", lambda imitated: torch.arange(len(imitated)))
    torch.testing.assert_close(task.losses(batch, draw_of(batch))["loss"], few)
    assert seen == [int(imitated(task, batch).sum()), *[len(batch)] * 3]


@KINDS
def test_what_was_learned_does_not_change_the_targets(kind):
    task, batch = make_task(kind), make_batch()
    seen = []

    def kept(process, x_start, t, cond, noise, draw, make=task.imitation.target):
        seen.append(make(process, x_start, t, cond, noise, draw))
        return seen[-1]

    task.imitation.target = kept
    first = task.losses(batch, draw_of(batch))["loss"]
    for name, parameter in task.model.named_parameters():
        with torch.no_grad():
            parameter.normal_()
        assert parameter.requires_grad, name
    later = task.losses(batch, draw_of(batch))["loss"]
    assert torch.equal(*seen)
    assert (later != first).all() and (later[PRIOR] > 0).all()
    later[PRIOR].sum().backward()
    assert all(p.grad.any() for p in task.model.parameters())


@KINDS
def test_held_out_losses_are_those_of_the_images(kind):
    task, batch = make_task(kind).eval(), make_batch()
    with_base = task.held_out(batch, draw_of(batch))["loss"]
    task.imitation = None
    assert torch.equal(with_base, task.held_out(batch, draw_of(batch))["loss"]) and (with_base > 0).all()


def test_an_error_leaves_the_adapters_on():
    task, batch = make_task("v"), make_batch()
    with pytest.raises(KeyError), task.model.unadapted():
        raise KeyError
    for parameter in task.model.parameters():
        nn.init.normal_(parameter)
    adapted = task.model(batch.images, batch.index, batch.cond)
    with task.model.unadapted():
        assert not torch.equal(task.model(batch.images, batch.index, batch.cond), adapted)
    assert torch.equal(task.model(batch.images, batch.index, batch.cond), adapted)
