"""Every claim of speed, by name. To add one: a file with its two sides and its gate, and a line here."""

from . import train_step
from .timing import Benchmark

BENCHMARKS = {
    "train_step": Benchmark(
        "one training step of a 64-pixel U-Net of 64 channels, batch 4, fp32: Guided-Diffusion's form against ours",
        train_step.baseline, train_step.ours, train_step.gate, target=0.70,
    ),
}  # fmt: skip
