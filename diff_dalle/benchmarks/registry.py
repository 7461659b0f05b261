"""Every claim of speed, by name. To add one: a file with its two sides and its gate, and a line here."""

from . import cascade, gradient_cache, guidance, loader, train_step, use_checkpoint
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
    "gradient_cache": Benchmark(
        "the gradient of a contrastive loss over 256 samples: all at once against pieces of 16",
        gradient_cache.at_once, gradient_cache.in_pieces, gradient_cache.gate, target=1.6, memory_target=0.25,
    ),
    "guidance": Benchmark(
        "a sampling step of a 64-pixel U-Net, batch 4: alone against guided by a noised CLIP of its width and depth",
        guidance.unguided, guidance.guided, guidance.gate, target=2.2,
    ),
    "use_checkpoint": Benchmark(
        "a training step of an up-sampler to 256 pixels, batch 4: all activations kept against use_checkpoint",
        use_checkpoint.keeping, use_checkpoint.recomputing, use_checkpoint.gate, target=1.4, memory_target=0.45,
    ),
    "cascade": Benchmark(
        "a picture from three generators of which only one is in memory at a time: the largest alone against all",
        cascade.largest_alone, cascade.whole_cascade, cascade.gate, target=0.0, memory_target=1.15,
    ),
}  # fmt: skip
