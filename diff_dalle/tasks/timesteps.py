"""The base of tasks that draw a timestep for each sample."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..diffusion.diffusion_config import TrainingProcess
from ..diffusion.resample import TimestepConfig
from ..training.task import Task


class TimestepTask(Task):
    """A task on images noised by a diffusion process.

    ``losses`` must report "t" and, with a loss-aware schedule sampler, which sets ``observed``, "unweighted_loss".

    process: the full (not respaced) process.
    """

    recorded = ("t",)

    def __init__(self, model: nn.Module, process: TrainingProcess, config: TimestepConfig):
        super().__init__()
        self.model, self.process, self.config = model, process, config
        self.schedule_sampler = config.sampler(process)
        self.observed = ("t", "unweighted_loss") if self.schedule_sampler.observes else ()

    def observe(self, values: Mapping[str, Tensor]) -> None:
        self.schedule_sampler.update(values["t"], values["unweighted_loss"])

    def extra_state(self) -> dict[str, Tensor]:
        return self.schedule_sampler.state_dict()

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self.schedule_sampler.load_state_dict(state)
