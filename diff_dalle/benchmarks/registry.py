"""All benchmarks by name. To add one: a file with a baseline, our version and a gate, and an entry here."""

from . import cascade, decoder_unet, gradient_cache, guidance, loader, train_step, use_checkpoint, watching
from .timing import Benchmark

BENCHMARKS = {
    "train_step": Benchmark(
        "training step of a 64-pixel U-Net, 64 channels, batch size 4, fp32: ours against Guided-Diffusion's",
        train_step.baseline,
        train_step.ours,
        train_step.gate,
        target=0.70,
    ),
    "watching": Benchmark(
        "the same training step with flight recorder and lifeline against without",
        watching.unwatched,
        watching.watched,
        watching.gate,
        target=1.02,
        paired=True,
    ),
    "decoding": Benchmark(
        "decoding JPEGs of 256 to 512 pixels to 64: at reduced scale against Guided-Diffusion's method",
        loader.full_size,
        loader.reduced,
        loader.decoding_gate,
        target=1 / 1.4,
    ),
    "loader": Benchmark(
        "batches of the same JPEGs from shards against decoding alone, one process each",
        loader.reduced,
        loader.from_shards,
        loader.loader_gate,
        target=1 / 0.9,
    ),
    "buckets": Benchmark(
        "batches of the same JPEGs from shards, of several aspect ratios against squares, one process each",
        loader.in_batches,
        loader.in_buckets,
        loader.bucket_gate,
        target=1 / 0.9,
    ),
    "gradient_cache": Benchmark(
        "gradient of a contrastive loss over 256 samples: cached in micro-batches of 16 against one batch",
        gradient_cache.at_once,
        gradient_cache.in_micro_batches,
        gradient_cache.gate,
        target=1.6,
        memory_target=0.25,
    ),
    "guidance": Benchmark(
        "sampling step of a 64-pixel U-Net, batch size 4: guided by a noised CLIP of equal size against unguided",
        guidance.unguided,
        guidance.guided,
        guidance.gate,
        target=2.2,
    ),
    "use_checkpoint": Benchmark(
        "training step of an upsampler to 256 pixels, batch size 4: with use_checkpoint against without",
        use_checkpoint.without_checkpoint,
        use_checkpoint.with_checkpoint,
        use_checkpoint.gate,
        target=1.4,
        memory_target=0.45,
    ),
    "cascade": Benchmark(
        "sampling an image with a cascade of three stages, one in memory at a time, against the largest stage alone",
        cascade.largest_alone,
        cascade.whole_cascade,
        cascade.gate,
        target=0.0,
        memory_target=1.15,
    ),
    "decoder_unet": Benchmark(
        "training step of the decoder's U-Net at a quarter of its width, 64 pixels: ours against plain torch modules",
        decoder_unet.plain,
        decoder_unet.ours,
        decoder_unet.gate,
        target=0.80,
        memory_target=0.75,
    ),
    "decoder_unet_checkpoint": Benchmark(
        "the same step: with checkpoint_during_training against without",
        decoder_unet.ours,
        decoder_unet.ours_checkpointed,
        decoder_unet.checkpoint_gate,
        target=1.4,
        memory_target=0.5,
    ),
}
