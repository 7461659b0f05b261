"""A three-parameter task and an endless dataset: everything the loop needs, small enough to check by hand."""

from __future__ import annotations

import torch
from torch import nn

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.randomness import Draw
from diff_dalle.tracking.tracker import Tracker
from diff_dalle.training.task import Task

WORLD = World(SINGLE, torch.device("cpu"))


class ToyTask(Task):
    """Fits x · w to a noisy target. Positions in ``poison`` give a NaN loss."""

    def __init__(self, poison: set[int] = frozenset(), observed: tuple[str, ...] = ()):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 1))
        self.poison, self.observed = poison, observed
        self.seen: list[list[float]] = []

    def losses(self, batch, draw):
        x = batch.images.flatten(1)
        target = x.mean(1) + 0.1 * draw.normal("noise", ())
        loss = (self.model(x)[:, 0] - target).square()
        bad = torch.tensor([p in self.poison for p in batch.index.tolist()], device=loss.device)
        loss = loss * (1 + torch.where(bad, torch.nan, 0.0))
        position = batch.index.to(loss.device).float()
        return {"loss": loss, "even": torch.where(position % 2 == 0, loss, torch.nan), "position": position}

    def observe(self, values):
        self.seen.append(values["position"].tolist())


class TwoOptimizers(Task):
    """A model and a critic that pull in opposite directions, as an autoencoder and its discriminator do."""

    parts = ("", "critic")

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 12))
        self.critic = nn.Linear(12, 1)

    def part_modules(self, part):
        return {"critic": self.critic} if part == "critic" else {"model": self.model}

    def part_losses(self, part, batch, draw):
        x = batch.images.flatten(1)
        made = self.model(x)
        if part == "critic":
            return {"loss": (self.critic(made) - self.critic(x))[:, 0].square()}
        return {"loss": (made - x).square().mean(1) - 0.1 * self.critic(made)[:, 0]}


class ToyData:
    """Images that are a function of their position; rank r of R gets positions r, r + R, …"""

    samples = 64

    def __init__(self, batch_size: int, rank: int = 0, size: int = 1):
        self.batch_size, self.rank, self.size = batch_size, rank, size

    def batch_at(self, positions) -> Batch:
        index = torch.tensor(list(positions))
        return Batch(Draw(99, index).normal("image", (3, 2, 2)), Conditioning(), index)

    def batches_at(self, blocks):
        yield from map(self.batch_at, blocks)

    def batches(self, position: int, should_stop=lambda: False):
        while True:
            yield self.batch_at(range(position + self.rank, position + self.batch_size * self.size, self.size))
            position += self.batch_size * self.size

    def describe(self, position: int) -> str:
        return f"sample-{position}"


class ListTracker(Tracker):
    """Keeps what the loop reports."""

    def __init__(self):
        self.rows, self.finished = [], False

    def log(self, step, scalars):
        self.rows.append((step, scalars))

    def images(self, step, name, grid):
        self.rows.append((step, {name: grid.shape}))

    def finish(self):
        self.finished = True


def run(loop, tracker=None):
    """What the tracker is told while a loop runs."""
    tracker = tracker or ListTracker()
    loop.run(tracker)
    return tracker


def weights(trainee):
    return torch.cat([p.detach().flatten() for p in trainee.task.model.parameters()])
