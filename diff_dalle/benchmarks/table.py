"""Every claim of speed, by name. To add one: a file with its two sides and its gate, and a line here."""

from . import loader, train_step
from .timing import Benchmark

BENCHMARKS = {
    "train_step": Benchmark(
        "one training step of a 64-pixel U-Net of 64 channels, batch 4, fp32: Guided-Diffusion's form against ours",
        train_step.baseline, train_step.ours, train_step.gate, target=0.70,
    ),
    "decoding": Benchmark(
        "jpegs of 256 to 512 pixels to 64: Guided-Diffusion's way against decoding at a fraction",
        loader.plainly, loader.fast, loader.decoding_gate, target=1 / 1.4,
    ),
    "loader": Benchmark(
        "the same jpegs: bare decoding in a loop against batches from shards, one process each",
        loader.fast, loader.from_shards, loader.loader_gate, target=1 / 0.9,
    ),
}  # fmt: skip
