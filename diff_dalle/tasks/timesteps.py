"""The base of tasks that draw a timestep for each sample."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..diffusion.gaussian_diffusion import GaussianDiffusion
from ..diffusion.resample import TimestepConfig, create_named_schedule_sampler
from ..training.task import Task


class TimestepTask(Task):
    """A task on images noised by a diffusion process.

    ``losses`` must report "t" and, with a loss-aware schedule sampler, which sets ``observed``, "unweighted_loss".

    process: the full (not respaced) process.
    """

    recorded = ("t",)

    def __init__(self, model: nn.Module, process: GaussianDiffusion, config: TimestepConfig):
        super().__init__()
        self.model, self.process, self.config = model, process, config
        self.schedule_sampler = create_named_schedule_sampler(config.schedule_sampler, process)
        self.observed = () if config.schedule_sampler == "uniform" else ("t", "unweighted_loss")

    def observe(self, values: Mapping[str, Tensor]) -> None:
        self.schedule_sampler.update(values["t"], values["unweighted_loss"])

    def extra_state(self) -> dict[str, Tensor]:
        return self.schedule_sampler.state_dict()

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self.schedule_sampler.load_state_dict(state)
