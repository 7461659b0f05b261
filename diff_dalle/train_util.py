"""``guided_diffusion.train_util``: its training loop, whose checkpoints are plain state dicts.

For runs that survive a kill, see ``training/``: scripts/train_generator.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from . import dist_util, logger, storage
from .config import InputError
from .fp16_util import INITIAL_LOG_LOSS_SCALE, MixedPrecisionTrainer
from .nn import update_ema
from .resample import LossAwareSampler, ScheduleSampler, UniformSampler

__all__ = [
    "INITIAL_LOG_LOSS_SCALE",
    "TrainLoop",
    "find_ema_checkpoint",
    "find_resume_checkpoint",
    "get_blob_logdir",
    "log_loss_dict",
    "parse_resume_step_from_filename",
]


class TrainLoop:
    """Trains a network on batches of images and keyword arguments of the network.

    data:              iterator over (images [N, C, H, W], {name: [N, …]}), this rank's.
    microbatch:        samples at a time; below 1 = the whole batch. The gradient is that of the whole batch.
    ema_rate:          a rate, or several as "0.99,0.9999".
    save_interval:     steps between checkpoints: modelSTEP.pt, ema_RATE_STEP.pt and optSTEP.pt in the log directory.
    resume_checkpoint: a modelSTEP.pt to go on from, with the files beside it.
    lr_anneal_steps:   the learning rate falls linearly to 0 at this step, where training ends; 0 = it never ends.

    InputError for a checkpoint that does not fit the network.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        diffusion: Any,
        data: Iterator[tuple[Tensor, Mapping[str, Tensor]]],
        batch_size: int,
        microbatch: int,
        lr: float,
        ema_rate: float | str,
        log_interval: int,
        save_interval: int,
        resume_checkpoint: str,
        use_fp16: bool = False,
        fp16_scale_growth: float = 1e-3,
        schedule_sampler: ScheduleSampler | None = None,
        weight_decay: float = 0.0,
        lr_anneal_steps: int = 0,
    ):
        self.model, self.diffusion, self.data = model, diffusion, data
        self.batch_size, self.microbatch = batch_size, microbatch if microbatch > 0 else batch_size
        self.lr, self.lr_anneal_steps = lr, lr_anneal_steps
        self.ema_rate = [float(rate) for rate in str(ema_rate).split(",")]
        self.log_interval, self.save_interval = log_interval, save_interval
        self.resume_checkpoint = find_resume_checkpoint() or resume_checkpoint
        self.schedule_sampler = schedule_sampler or UniformSampler(diffusion)
        self.world = dist_util.world()
        self.global_batch = batch_size * self.world.size
        self.step = self.resume_step = 0

        if self.resume_checkpoint:
            self.resume_step = parse_resume_step_from_filename(self.resume_checkpoint)
            logger.log(f"going on from {self.resume_checkpoint} at step {self.resume_step}")
            _load(model, self.resume_checkpoint)
        dist_util.sync_params(model.parameters())
        self.mp_trainer = MixedPrecisionTrainer(model=model, use_fp16=use_fp16, fp16_scale_growth=fp16_scale_growth)
        self.opt = AdamW(self.mp_trainer.master_params, lr=lr, weight_decay=weight_decay)
        self.ema_params = [
            [parameter.detach().clone() for parameter in self.mp_trainer.master_params] for _ in self.ema_rate
        ]
        if self.resume_checkpoint:
            self._load_beside()
        self.ddp_model = model
        if self.world.size > 1:
            devices = [self.world.device] if self.world.device.type == "cuda" else None
            self.ddp_model = DistributedDataParallel(model, devices, broadcast_buffers=False)

    def _load_beside(self) -> None:
        """The averages and the optimizer's state, where there are files of them."""
        for rate, averages in zip(self.ema_rate, self.ema_params, strict=True):
            path = find_ema_checkpoint(self.resume_checkpoint, self.resume_step, rate)
            if path is None:
                logger.log(f"there are no averages of rate {rate:g}: they start from the weights")
                continue
            state = dist_util.load_state_dict(path, map_location=dist_util.dev())
            found = self.mp_trainer.state_dict_to_master_params(state)
            for average, value in zip(averages, found, strict=True):
                average.copy_(value)
        path = _beside(self.resume_checkpoint, f"opt{self.resume_step:06d}.pt")
        if not storage.exists(path):
            logger.log(f"there is no {path}: the optimizer starts anew")
            return
        state = dist_util.load_state_dict(path, map_location=dist_util.dev())
        check_optimizer(self.opt, state, path)
        self.opt.load_state_dict(state)

    def run_loop(self) -> None:
        """Train to the end, if there is one, and save."""
        while not self.lr_anneal_steps or self.step + self.resume_step < self.lr_anneal_steps:
            self.run_step(*next(self.data))
            if self.step % self.log_interval == 0:
                logger.dumpkvs()
            if self.step % self.save_interval == 0:
                self.save()
            self.step += 1
        if (self.step - 1) % self.save_interval:
            self.save()

    def run_step(self, batch: Tensor, cond: Mapping[str, Tensor]) -> None:
        """One update."""
        self.forward_backward(batch, cond)
        if self.mp_trainer.optimize(self.opt):
            self._update_ema()
        self._anneal_lr()
        self.log_step()

    def forward_backward(self, batch: Tensor, cond: Mapping[str, Tensor]) -> None:
        """The gradients of a batch."""
        self.mp_trainer.zero_grad()
        device = dist_util.dev()
        for start in range(0, len(batch), self.microbatch):
            piece = slice(start, start + self.microbatch)
            images = batch[piece].to(device)
            given = {name: value[piece].to(device) for name, value in cond.items()}
            t, weights = self.schedule_sampler.sample(len(images), device)
            is_last = start + self.microbatch >= len(batch)
            alone: contextlib.AbstractContextManager = contextlib.nullcontext()
            if isinstance(self.ddp_model, DistributedDataParallel) and not is_last:
                alone = self.ddp_model.no_sync()
            with alone:
                losses = self.diffusion.training_losses(self.ddp_model, images, t, model_kwargs=given)
                if isinstance(self.schedule_sampler, LossAwareSampler):
                    self.schedule_sampler.update_with_local_losses(t, losses["loss"].detach())
                log_loss_dict(self.diffusion, t, {name: value * weights for name, value in losses.items()})
                self.mp_trainer.backward((losses["loss"] * weights).sum() / len(batch))

    def _update_ema(self) -> None:
        for rate, averages in zip(self.ema_rate, self.ema_params, strict=True):
            update_ema(averages, self.mp_trainer.master_params, rate)

    def _anneal_lr(self) -> None:
        if self.lr_anneal_steps:
            done = (self.step + self.resume_step) / self.lr_anneal_steps
            for group in self.opt.param_groups:
                group["lr"] = self.lr * (1 - done)

    def log_step(self) -> None:
        """Log where training is."""
        step = self.step + self.resume_step
        logger.logkvs({"step": step, "samples": (step + 1) * self.global_batch})

    def save(self) -> None:
        """Write a checkpoint, on the first rank; every rank calls it."""
        step = self.step + self.resume_step
        self.world.on_main(lambda: self._write(step))

    def _write(self, step: int) -> None:
        weights = {f"model{step:06d}.pt": self.mp_trainer.master_params}
        weights |= {
            f"ema_{rate}_{step:06d}.pt": each for rate, each in zip(self.ema_rate, self.ema_params, strict=True)
        }
        states = {name: self.mp_trainer.master_params_to_state_dict(values) for name, values in weights.items()}
        for name, state in {**states, f"opt{step:06d}.pt": self.opt.state_dict()}.items():
            path = storage.join(get_blob_logdir(), name)
            logger.log(f"writing {path}")
            with storage.atomic_writer(path) as file:
                torch.save(state, file)


def _load(model: nn.Module, path: str) -> None:
    state = dist_util.load_state_dict(path, map_location=dist_util.dev())
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"{path} does not fit the network: {' '.join(str(error).split())}") from None


def check_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], path: str) -> None:
    """InputError for a file of an optimizer's state that is of other parameters, such as those of Guided-Diffusion's
    own networks, whose shapes differ from ours."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = state.get("state", {})
    averages = [values[number].get("exp_avg") for number in sorted(values)]
    if [each.shape for each in averages if each is not None] != [parameter.shape for parameter in own]:
        raise InputError(
            f"{path} holds the state of an optimizer of other parameters than this network's (Guided-Diffusion's own "
            "files are): move it away to go on with a new optimizer"
        )


def _beside(path: str, name: str) -> str:
    folder = path.rpartition("/")[0]
    return f"{folder}/{name}" if folder else name


def parse_resume_step_from_filename(filename: str) -> int:
    """200 for …/model000200.pt; 0 for a name without a step."""
    found = re.search(r"model(\d+)(?:\.[^/]*)?$", filename)
    return int(found[1]) if found else 0


def get_blob_logdir() -> str:
    """Where checkpoints are written: the log directory."""
    return logger.get_dir()


def find_resume_checkpoint() -> str | None:
    """A checkpoint to go on from that no flag names: none. To be replaced by a cluster's own way to find one."""
    return None


def find_ema_checkpoint(main_checkpoint: str | None, step: int, rate: float) -> str | None:
    """The averages that were written with a model; None if there are none."""
    path = _beside(main_checkpoint, f"ema_{rate}_{step:06d}.pt") if main_checkpoint else ""
    return path if path and storage.exists(path) else None


def log_loss_dict(diffusion: Any, ts: Tensor, losses: Mapping[str, Tensor]) -> None:
    """Log the means of losses [N] at the steps ts [N], of all and of each quarter of the process (NAME_q0 … q3)."""
    quarters = (4 * ts // diffusion.num_timesteps).tolist()
    for name, values in losses.items():
        logger.logkv_mean(name, values.mean().item())
        for quarter, value in zip(quarters, values.tolist(), strict=True):
            logger.logkv_mean(f"{name}_q{quarter}", value)
