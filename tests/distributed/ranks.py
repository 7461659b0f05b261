"""Jobs of several processes that run one body after another: starting, and each process's first sharded step, take
seconds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest import mock

import torch
from forking import srun, start

DONE = "the body has run"
PREAMBLE = """
import dataclasses, hashlib, os
from unittest import mock
import torch
from torch import nn
import network_making
from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.content import numbered
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.distributed.launch import DistributedConfig, launch, run_script
from diff_dalle.distributed.parallel import build_sharded, build_shared, is_sharded, local
from diff_dalle.distributed.sharding_config import ShardingConfig
from diff_dalle.distributed.world import ALONE, SINGLE, World
from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.config import InputError
from diff_dalle.randomness import Draw
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.models.precision import DTYPES
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.units import parts_of
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee
from network_making import VOCABULARY, make_generator
from toy import ListTracker

CONFIG = OptimConfig(lr=1e-2, ema_rate=(0.5,), grad_clip=0.5)
SLOW = dataclasses.replace(CONFIG, lr=1e-3)
BOTH = dataclasses.replace(SLOW, optimizer="muon")  # its momenta, and AdamW's moments of other parameters

def randomize(network, seed=0, spread=0.1):
    # All at once, and not without values: many small operations take long there.
    parameters = list(network.parameters())
    if not parameters[0].is_meta:
        values = spread * torch.randn(sum(map(torch.numel, parameters)), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for parameter, value in zip(parameters, values.split([*map(torch.numel, parameters)])):
                parameter += value.view(parameter.shape)
    return network

network_making.randomize = randomize

def make_network():
    text = TextEncoderConfig(enc_attn_dim=12, enc_depth=1, enc_heads=3, text_length=10)
    small = {"image_size": 8, "channel_mult": (1,), "attention_resolutions": (8,)}
    return make_generator(text, use_checkpoint=True, dropout=0.1, **small)

def make_task(model):
    process = create_gaussian_diffusion(DiffusionConfig(50, "cosine"))
    return DenoisingTask(model, process, DenoisingConfig())

def make_pieces(positions, step, size=2):
    index = torch.tensor(list(positions)) + 100 * step
    draw = Draw(9, index)
    tokens = (torch.stack([draw.uniform(f"token {i}") for i in range(5)], 1) * VOCABULARY).long()
    cond = Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    batch = Batch(draw.normal("image", (3, 8, 8)).tanh(), cond, index)
    return [(piece, Draw(0, piece.index)) for piece in batch.split(size)]

def make_sharded(build, world, mode="fsdp", precision="fp32", **settings):
    config = ShardingConfig(mode, **settings)
    return build_sharded(build, lambda network: parts_of(network, DTYPES.get(precision)), world, config)

def train(trainee, world, steps):
    rows = []
    for step in range(steps):
        trainee.update(make_pieces(range(world.rank, 8, world.size), step, 4 // world.size), step)
        found = trainee.scalars()
        rows.append((found["loss"], found["grad_norm"]))
    return torch.tensor(rows, dtype=torch.float64)

def held(trainee):
    state = trainee.optimizations[""].optimizer.state.values()
    kept = [*trainee.task.model.parameters(), *(value for entry in state for value in entry.values())]
    kept += [value for ema in trainee.emas for value in ema.averages.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in local(kept))

class Data:
    samples = 64
    def __init__(self, world):
        self.world = world
    def batches(self, position, should_stop=None):
        while True:
            ((batch, _),) = make_pieces(range(position + self.world.rank, position + 8, self.world.size), 0, 8)
            yield batch
            position += 8
    def batches_at(self, blocks):
        for block in blocks:
            ((batch, _),) = make_pieces(block, 0, 8)
            yield batch

def make_loop(world, folder, mode="fsdp", seed=0, consolidate=False, **settings):
    def build():
        return randomize(make_network(), seed)
    groups = {"shard_processes": 2} if mode == "hsdp" else {}
    sharded = mode != "ddp" and world.size > 1
    model = make_sharded(build, world, mode, **groups) if sharded else build_shared(build, world)
    if mode == "ddp":
        model = model.to(memory_format=torch.channels_last)
    trainee = Trainee(make_task(model), BOTH, "fp32", world)
    defaults = {"batch_size": 8 // world.size, "iterations": 2, "save_interval": 100, "precision": "fp32"}
    config = TrainingConfig(**{**defaults, **settings}, sharding=ShardingConfig(mode, consolidate=consolidate))
    run = world.broadcast(open_run(folder, Identity("toy", {}), TrainingConfig) if world.is_main else None)
    return TrainLoop(config, [trainee], Data(world), run, world)

def digest(loop):
    # Of all that a checkpoint holds, independent of memory layout; shares in the order of their ranks.
    outline, tensors = numbered(loop.trainees[0].states())
    found = hashlib.sha256(repr(sorted(str(outline).split())).encode())
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    size = sharded[0].device_mesh.size(-1) if sharded else 1
    ranks = loop.world.gather([tensor.to_local().detach() for tensor in sharded])[:size]
    shares = iter(zip(*ranks))
    for tensor in tensors:
        whole = torch.cat(next(shares)) if is_sharded(tensor) else tensor
        assert whole.shape == tensor.shape
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"{loop.step} {found.hexdigest()}"
"""


def environment() -> dict[str, str]:
    """This process's, without launchers' variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "SLURM_"))}
    return {**env, "OMP_NUM_THREADS": "1"}


def run_ranks_of(size: int, body: str) -> str:
    """What processes with a ``world`` that run the preamble and ``body`` print; with one process, here."""
    body = PREAMBLE + textwrap.dedent(body)
    if size == 1:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch("network_making.randomize"):
            exec("from diff_dalle.distributed.world import ALONE as world\n" + body, {})
        return out.getvalue()
    job = _job(size)
    try:
        return job.run(body)
    except BaseException:
        _job.cache_clear()
        raise


@functools.cache
def _job(size: int) -> _Job:
    return _Job(size)


class _Job:
    def __init__(self, size: int):
        self.folder, self.count, self.seen = Path(tempfile.mkdtemp(prefix="ranks_")), 0, 0
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        pipe = self.folder / "bodies"
        os.mkfifo(pipe)
        self.bodies = os.fdopen(os.open(pipe, os.O_RDWR), "w")
        self.outputs = [self.folder / f"{rank}.txt" for rank in range(size)]
        self.processes = [
            start([__file__, str(pipe)], {**environment(), **own}, output=output)
            for own, output in zip(srun(size), self.outputs, strict=True)
        ]

    def run(self, body: str) -> str:
        path = self.folder / f"{self.count}.py"
        path.write_text(body)
        self.count += 1
        print(path, file=self.bodies, flush=True)
        deadline = time.monotonic() + 240
        while True:
            ended = any(process.poll() is not None for process in self.processes)
            text = self.outputs[0].read_text()
            if text.count(DONE) == self.count:
                text, self.seen = text[self.seen :], len(text)
                return text
            if ended or time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
                raise AssertionError("\n".join(output.read_text() for output in self.outputs))
            time.sleep(0.02)


def main() -> None:
    config = DistributedConfig(device="cpu", threads=1, start_timeout=120, timeout=7200)
    with launch(config) as world, open(sys.argv[1]) as bodies:
        while path := world.broadcast(bodies.readline().strip() if world.is_main else None):
            torch.manual_seed(0)
            exec(compile(Path(path).read_text(), path, "exec"), {"world": world})
            world.barrier()
            world.print(DONE)


if __name__ == "__main__":
    from diff_dalle.distributed.launch import DistributedConfig, launch, run_script

    run_script(main)
