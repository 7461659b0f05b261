"""One network in training: its optimizer, averages and loss scale, and the update step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..batch import Batch
from ..distributed.world import World
from ..randomness import Draw
from .ema import Ema
from .optim import OptimConfig, build_optimizer, learning_rate
from .precision import LossScale, autocast, resolve_precision
from .task import Piece, Task


class Meter:
    """Running means of named per-sample values, summed up on the device; reading them is the only wait.

    NaN in a value other than "loss" means that it does not apply to that sample.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.names: tuple[str, ...] = ()
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = self.counts = torch.zeros(0, device=device, dtype=self.dtype)

    def add(self, values: Mapping[str, Tensor]) -> None:
        if tuple(values) != self.names:
            if self.names:
                raise ValueError(f"a task reported {tuple(values)} after {self.names}: the names must stay the same")
            self.names = tuple(values)
            self.sums = torch.zeros(len(values), device=self.device, dtype=self.dtype)
            self.counts = torch.zeros_like(self.sums)
        table = torch.stack([value.detach().float() for value in values.values()])  # [names, samples]
        applies = ~table.isnan()
        applies[self.names.index("loss") if "loss" in self.names else slice(0, 0)] = True
        self.sums += torch.where(applies, table, 0.0).sum(1)
        self.counts += applies.sum(1)

    def read(self, world: World) -> dict[str, float]:
        """The means over all ranks since the last reading. Waits for the device; every rank calls it."""
        both = torch.stack([self.sums, self.counts]).tolist()
        mine = dict(zip(self.names, zip(*both, strict=True), strict=True))
        self.sums.zero_()
        self.counts.zero_()
        means = {}
        everyone = world.gather(mine)  # by name: a rank may have had nothing to add
        for name in dict.fromkeys(name for part in everyone for name in part):
            total, count = (sum(part[name][i] for part in everyone if name in part) for i in (0, 1))
            if count > 0:
                means[name] = total / count
        return means


class Trainee:
    """A task together with everything that changes while its network is trained.

    name: prefix of its checkpoint files and log entries; empty when the run trains a single network.
    """

    def __init__(self, task: Task, config: OptimConfig, precision: str, world: World, name: str = ""):
        self.name, self.config, self.world = name, config, world
        self.task = task.to(world.device)
        self.precision = resolve_precision(precision, world.device)
        self.parallel = world.parallel(self.task)
        self.optimizer = build_optimizer(config, self.task.model)
        self.parameters = [p for p in self.task.model.parameters() if p.requires_grad]
        self.emas = [Ema(rate, self.task.model) for rate in config.ema_rate]
        self.loss_scale = LossScale.create(self.precision, world.device)
        self.meter, self.norms = Meter(world.device), Meter(world.device)
        self.bad_steps = torch.zeros(3, device=world.device)  # in all, in a row just now, longest row
        self.bad_samples: Tensor | None = None  # positions in the latest step that was not finite

    def _forward(self, batch: Batch, draw: Draw, sync: bool) -> dict[str, Tensor]:
        if self.world.size > 1:
            self.parallel.require_backward_grad_sync = sync  # what DDP's own no_sync() sets
        with autocast(self.precision, self.world.device):
            return self.parallel(batch, draw)

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        """The update that follows ``step`` finished ones. Nothing in it waits for the device.

        A step whose gradient is not finite leaves weights and optimizer as they are and is counted.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        self.optimizer.zero_grad(set_to_none=True)
        reports = self.task.backward(pieces, self._forward, self.loss_scale.scale)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / self.loss_scale.scale
        overflowed = (~norm.isfinite()).float()
        self._rescale(gradients, norm)
        # Fused AdamW leaves out the whole update, its step count included, where found_inf is 1.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, overflowed
        self.optimizer.step()
        for ema in self.emas:
            ema.update(step + 1)
        self.loss_scale.update(overflowed)
        self._count(overflowed, pieces)
        for values in reports:
            self.meter.add({name: value for name, value in values.items() if name not in self.task.observed})
        self.norms.add({"grad_norm": torch.where(norm.isfinite(), norm, torch.nan)[None]})
        self._observe(reports)

    def _rescale(self, gradients: list[Tensor], norm: Tensor) -> None:
        factor = 1 / self.loss_scale.scale
        if self.config.grad_clip > 0:
            factor = factor * (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        if self.config.grad_clip > 0 or self.loss_scale.dynamic:
            torch._foreach_mul_(gradients, factor)

    def _count(self, overflowed: Tensor, pieces: Sequence[Piece]) -> None:
        total, row, longest = self.bad_steps.unbind()
        total += overflowed
        row.add_(1).mul_(overflowed)
        torch.maximum(longest, row, out=longest)
        index = torch.cat([batch.index for batch, _ in pieces]).to(self.world.device, non_blocking=True)
        before = torch.full_like(index, -1) if self.bad_samples is None else self.bad_samples
        if before.shape == index.shape:
            index = torch.where(overflowed > 0, index, before)
        self.bad_samples = index

    def _observe(self, reports: Sequence[Mapping[str, Tensor]]) -> None:
        if self.task.observed:
            self.task.observe(
                {name: self.world.interleave(torch.cat([r[name] for r in reports])) for name in self.task.observed}
            )

    def scalars(self) -> dict[str, float]:
        """What to log, averaged since the last call. Waits for the device; every rank calls it."""
        norms = self.norms.read(self.world)
        values = {**self.meter.read(self.world), **norms, "lr": self.optimizer.param_groups[0]["lr"]}
        values["skipped_steps"] = float(self.bad_steps[0])
        if self.loss_scale.dynamic:
            values["loss_scale"] = float(self.loss_scale.scale)
        return values

    def longest_bad_row(self) -> int:
        """The longest row of non-finite steps since the last call. Waits for the device."""
        longest = int(self.bad_steps[2])
        self.bad_steps[2] = self.bad_steps[1]
        return longest

    @property
    def prefix(self) -> str:
        """Before its names in logs and checkpoints."""
        return f"{self.name}/" if self.name else ""

    def evaluated(self) -> tuple[str, dict[str, Tensor]]:
        """Role and state dict of what is evaluated: the first average, or the weights if there is none."""
        return (self.emas[0].role, self.emas[0].state()) if self.emas else ("model", self.task.model.state_dict())

    def states(self) -> dict[str, dict]:
        """State dicts by role, for a checkpoint."""
        states = {"model": self.task.model.state_dict()}
        states |= {ema.role: ema.state() for ema in self.emas}
        states["optimizer"] = {
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.loss_scale.state(),
            "bad_steps": self.bad_steps,
            "task": self.task.extra_state(),
        }
        return states

    def load_optimizer(self, state: dict) -> None:
        own = [{**group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)  # this run's weight decay and betas, not the file's
        self.loss_scale.load_state(state["loss_scale"])
        self.bad_steps.copy_(state["bad_steps"])
        self.task.load_extra_state(state["task"])
