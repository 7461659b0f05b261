"""A task that trains a process in log-SNR, and its run on data that are a function of their position."""

from __future__ import annotations

import torch
from torch import nn

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess
from diff_dalle.distributed.world import World
from diff_dalle.randomness import Draw
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.task import Task
from diff_dalle.training.trainee import Trainee

ADAPTIVE = LogSnrConfig(log_snr_schedule="adaptive", loss_weighting=("adaptive",), offset_noise=0.1, pyramid_noise=0.75)


class LogSnrTask(Task):
    """Denoises with one linear map, as a task of a latent network does."""

    observed = ("log_snr", "mse")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.process = nn.Linear(8, 8), LogSnrProcess(ADAPTIVE)

    def losses(self, batch: Batch, draw: Draw) -> dict[str, torch.Tensor]:
        t = self.process.training_times(draw.uniform("timestep"))
        noise = self.process.noise(draw.normal, batch.images.shape[1:])
        terms = self.process.training_losses(
            lambda x, t: self.model(x.flatten(1)).view_as(x), batch.images, t, noise=noise
        )
        return {"loss": terms["loss"], "mse": terms["mse"].detach(), "log_snr": self.process.log_snr(t)}

    def observe(self, values):
        self.process.observe(values["log_snr"], values["mse"])

    def extra_state(self):
        return self.process.state_dict()


def make_trainee(world: World) -> Trainee:
    return Trainee(LogSnrTask(), OptimConfig(lr=0.05), "fp32", world)


def train(trainee: Trainee, steps: int, micro: int = 2) -> None:
    """Steps of 8 samples on all ranks, in micro-batches."""
    world = trainee.world
    for step in range(steps):
        index = torch.arange(8 * step + world.rank, 8 * (step + 1), world.size)
        batch = Batch(Draw(1, index).normal("latent", (2, 2, 2)), Conditioning(), index)
        trainee.update([(piece, Draw(2, piece.index)) for piece in batch.split(micro)], step)
