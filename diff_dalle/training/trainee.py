"""One task in training: its optimizers and EMA weights, and the update step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Batch
from ..checkpoints.content import check_like, replaced
from ..config import Fault, InputError, named
from ..distributed.parallel import Replicas, Shards, is_sharded
from ..distributed.world import World
from ..models.precision import autocast, training_precision
from ..randomness import Draw
from .ema import Ema
from .flight import FlightRecorder
from .optim import OptimConfig, Optimization
from .task import Meter, Piece, Task


class Trainee:
    """A task together with everything that changes while it is trained.

    config: of its optimizer, or one for each of ``task.parts``; the first one says the averages of ``task.model``.
    name:   prefix of its checkpoint files and log entries; empty when the run has a single trainee.
    """

    def __init__(
        self, task: Task, config: OptimConfig | Mapping[str, OptimConfig], precision: str, world: World, name: str = ""
    ):
        self.name, self.world = name, world
        self.task = task.to(world.device)
        self.precision = training_precision(precision, world.device)
        configs = dict.fromkeys(task.parts, config) if isinstance(config, OptimConfig) else dict(config)
        self.optimizations = {
            part: Optimization(configs[part], task.part_modules(part), self.precision, world) for part in task.parts
        }
        first, *others = task.parts
        self.is_sharded = any(map(is_sharded, self.task.parameters()))
        trained = [p for each in self.optimizations.values() for p in each.parameters]
        if self.is_sharded and (others or any(p.ndim and not is_sharded(p) for p in trained)):
            raise InputError(
                f"{type(task).__name__} trains several networks or with several optimizers, of which only one can be "
                f"sharded: set {named('parallel')} ddp"
            )
        self.replicas: dict[str, Replicas | Shards] = {
            part: Shards(self.task, each.parameters, world)
            if self.is_sharded
            else Replicas(self.task, each.parameters, world, init_sync=part == first)  # once for the whole task
            for part, each in self.optimizations.items()
        }
        for part in others:
            if configs[part].ema_rate not in ((), OptimConfig.ema_rate, configs[first].ema_rate):
                rule = f"is {configs[part].ema_rate}, but only that of the first optimizer counts: leave it out"
                raise InputError(Fault("ema_rate", f"of the optimizer {part!r} {rule}"))
        averaged = configs[first]
        self.emas = [Ema(rate, self.task.model, averaged.ema_start, averaged.ema_every) for rate in averaged.ema_rate]
        if self.emas:  # they are in place in previews, and swapping them again puts the others back
            task.unaveraged = self.emas[0].in_place
        losses = [_named(part, "loss") for part in task.parts]
        self.meter, self.norms = Meter(world.device, losses), Meter(world.device)
        self.bad_steps = torch.zeros(3, device=world.device)  # in all, consecutive until now, longest run of them
        self.flight = FlightRecorder(world.device)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that its optimizers train, those of all shards."""
        return sum(p.numel() for each in self.optimizations.values() for p in each.parameters)

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        """The update that follows ``step`` completed ones: one of each optimizer. Nothing in it waits for the device.

        A step whose gradient is not finite leaves weights and optimizer unchanged and is counted.
        """
        report: dict[str, Tensor] = {}
        norms, scales, overflows = {}, {}, []
        for part, optimization in self.optimizations.items():
            optimization.begin(step)
            with self._training_only(part):
                found = self.task.backward(pieces, self._forward(part), optimization.loss_scale.scale)
            scales[_named(part, "loss_scale")] = optimization.loss_scale.scale.clone()
            report |= {_named(part, name): _joined([values[name] for values in found]) for name in found[0]}
            norm, overflowed = optimization.finish(report[_named(part, "loss")])
            norms[_named(part, "grad_norm")] = norm
            overflows.append(overflowed)
        bad = torch.stack(overflows).amax(0)
        self._count(bad)
        kept = [*self.task.recorded, *(_named(part, "loss") for part in self.optimizations)]
        position = torch.cat([draw.positions for _, draw in pieces])
        self.flight.record(step + 1, bad, position, {name: report[name] for name in kept}, {**norms, **scales})
        unlogged = {*self.task.observed, *self.task.recorded}
        self.meter.add({name: value for name, value in report.items() if name not in unlogged})
        self.norms.add({name: torch.where(norm.isfinite(), norm, torch.nan)[None] for name, norm in norms.items()})
        if self.task.observed:
            self.task.observe({name: self.world.interleave(report[name]) for name in self.task.observed})
        for ema in self.emas:
            ema.update(step + 1)

    def _forward(self, part: str):
        """The task's forward pass of one part, under autocast and data parallelism."""

        def forward(batch: Batch, draw: Draw, sync: bool) -> dict[str, Tensor]:
            with autocast(self.precision, self.world.device):
                return self.replicas[part](batch, draw, part, sync=sync)

        return forward

    @contextlib.contextmanager
    def _training_only(self, part: str) -> Iterator[None]:
        """Gradients for the parameters of one part only, inside the block. Parts may share parameters."""
        own = {id(p) for p in self.optimizations[part].parameters}
        others = [p for each in self.optimizations.values() for p in each.parameters if id(p) not in own]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _count(self, bad: Tensor) -> None:
        total, row, longest = self.bad_steps.unbind()
        total += bad
        row.add_(1).mul_(bad)
        torch.maximum(longest, row, out=longest)

    def scalars(self) -> dict[str, float]:
        """What to log, averaged since the last call. Waits for the device; a collective: every rank calls it."""
        norms = self.norms.read(self.world)
        values = {**self.meter.read(self.world), **norms}
        for part, optimization in self.optimizations.items():
            values[_named(part, "lr")] = optimization.optimizer.param_groups[-1]["lr"]  # the first may be muon's
            if optimization.loss_scale.dynamic:
                values[_named(part, "loss_scale")] = float(optimization.loss_scale.scale)
        values["skipped_steps"] = float(self.bad_steps[0])
        return values

    def consecutive_bad_steps(self) -> int:
        """The largest number of consecutive non-finite steps since the last call. Waits for the device."""
        longest = int(self.bad_steps[2])
        self.bad_steps[2] = self.bad_steps[1]
        return longest

    @property
    def prefix(self) -> str:
        """Prefix of its names in logs and checkpoints."""
        return f"{self.name}/" if self.name else ""

    @property
    def roles(self) -> tuple[str, ...]:
        """Of its states in a checkpoint."""
        return "model", *(ema.role for ema in self.emas), "optimizer"

    @property
    def evaluated_role(self) -> str:
        """What is evaluated: the first EMA weights, or the weights if there are none."""
        return self.emas[0].role if self.emas else "model"

    def evaluated(self) -> tuple[str, dict[str, Tensor]]:
        """``evaluated_role`` and its state dict."""
        return self.evaluated_role, self.networks()[self.evaluated_role]

    def networks(self) -> dict[str, dict[str, Tensor]]:
        """State dicts of the network by role: with the weights, and with each average in their place."""
        return {"model": self.task.model.state_dict(), **{ema.role: ema.state() for ema in self.emas}}

    def states(self) -> dict[str, dict[str, Any]]:
        """State dicts by role, for a checkpoint. Every rank calls it."""
        return {**self.networks(), "optimizer": self._optimizer_entry(Optimization.state)}

    def _optimizer_entry(self, state_of: Callable[[Optimization], dict[str, Any]]) -> dict[str, Any]:
        first, *others = self.task.parts
        entry = {
            **state_of(self.optimizations[first]),
            "bad_steps": self.bad_steps,
            "task": self.task.extra_state(),
        }
        if others:
            entry["parts"] = {part: state_of(self.optimizations[part]) for part in others}
        if beside := {name: module.state_dict() for name, module in self._beside_model()}:
            entry["modules"] = beside
        return entry

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The weights, and of each average its own values, by role; they share the memory of the present ones."""
        return {"model": self.task.model.state_dict(), **{ema.role: ema.averages for ema in self.emas}}

    def loadable(self, outline: Mapping[str, Any] | None) -> dict[str, Any]:
        """``states`` with tensors that are to be overwritten: the weights and averages themselves, and an "optimizer"
        entry for ``load_optimizer``, in which those of a sharded parameter are sharded likewise.

        outline: such an entry, with the shapes and types of the tensors; None = there is none.
        """
        if outline is None:
            return dict(self.weights())
        optimizer = self.optimizations[self.task.parts[0]].optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def empty(given: Tensor) -> Tensor:
            return torch.empty(given.shape, dtype=given.dtype, device=self.world.device)

        def like(parameter: Tensor, given: Tensor) -> Tensor:
            return torch.empty_like(parameter, dtype=given.dtype) if given.shape == parameter.shape else empty(given)

        entry = replaced({**outline, "optimizer": {**outline["optimizer"], "state": {}}}, empty)
        for name, module in self._beside_model():
            own, values = module.state_dict(), outline["modules"][name]
            entry["modules"][name] = {each: like(own[each], given) for each, given in values.items()}
        entry["optimizer"]["state"] = {
            number: {name: like(parameters[number], given) for name, given in values.items()}
            for number, values in outline["optimizer"]["state"].items()
        }
        return {**self.weights(), "optimizer": entry}

    def check_optimizer(self, state: Mapping[str, Any], path: str) -> None:
        """InputError, which names the file, when ``load_optimizer`` cannot restore its state."""
        try:
            check_like(self._optimizer_entry(Optimization.expected), state, "state")
        except InputError as error:
            raise InputError(f"{path} does not fit this run: its {error.message(named)}") from None

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the "optimizer" entry of ``states``."""
        first, *others = self.task.parts
        self.optimizations[first].load_state(state)
        for part in others:
            self.optimizations[part].load_state(state["parts"][part])
        for name, module in self._beside_model():
            module.load_state_dict(state["modules"][name])
        self.bad_steps.copy_(state["bad_steps"])
        self.task.load_extra_state(state["task"])

    def _beside_model(self) -> Iterator[tuple[str, nn.Module]]:
        """The trained modules that are not part of ``task.model``, by name."""
        inside = set(self.task.model.modules())
        for part in self.task.parts:
            for name, module in self.task.part_modules(part).items():
                if module not in inside:
                    yield name, module


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _named(part: str, name: str) -> str:
    """What a value of an optimizer's part is called in logs."""
    return f"{part}_{name}" if part else name
