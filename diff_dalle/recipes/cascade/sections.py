"""What a cascade's file says beside the documented keys, and which of those are no settings of their own here."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Fault, faults_of, option, settings
from ...config.bounds import MAX_BATCH, MAX_PROCESSES, MAX_SECONDS, MAX_SEED, MAX_SIDE
from ...data.settings import workers_option
from ...diffusion.sampling import preview_share_option
from ...randomness import check_seeds

CONTROLNET_KEYS = (
    "controlnet_blocks", "controlnet_filter", "controlnet_filter_params", "controlnet_bottleneck_mode",
    "controlnet_checkpoint_path", "offset_noise",
)  # fmt: skip
LORA_KEYS = frozenset(("module_filters", "rank", "train_tokens", "lora_checkpoint_path"))
REFUSED = {
    **dict.fromkeys(CONTROLNET_KEYS, "belongs to the training of a ControlNet, which is another kind: leave it out"),
    **dict.fromkeys(LORA_KEYS, "belongs to the training of a LoRA: write kind: stage_c_lora, or leave it out"),
    "offset_noise": "is set under diffusion: write diffusion: {offset_noise: …}",
    "edm_objective": "never had an effect; for a network that predicts v write diffusion: {prediction: v}",
}
#: Keys of a file's root, by the paths of the settings that they are here.
HOMES = {"allow_tf32": ("distributed", "allow_tf32")}
#: What messages of shared code call by flags that this command does not have; see ``recipes.spelling``.
RENAMED = {
    "data_dir": "webdataset_path",
    "val_data_dir": "data.val_path",
    "logdir": "experiment_id",
    "caption_field": "captions_getter",
    "init_checkpoint": "generator_checkpoint_path",
    "iterations": "updates",
    "warmup_steps": "warmup_updates",
    "microbatch": "grad_accum_steps",
    "resume_checkpoint": "loop.resume_checkpoint",
    "preview_share": "loop.preview_share",
    "trackers": "wandb_project",
}


@settings
class DataSection:
    """Data"""

    val_path: tuple[str, ...] = option((), "held-out shards, as webdataset_path; none = no evaluation", free=True)
    bucket_factor: int = option(
        32, "with multi_aspect_ratio: both sides of images are multiples of this, in pixels", most=MAX_SIDE
    )
    bucket_distance: str = option(
        "linear",
        "distance of two ratios: their difference, or that of their logarithms, which treats both orientations alike",
        choices=("linear", "log"),
    )
    bucket_crop: str = option(
        "random",
        "crop of an image resized to cover its bucket; held-out images are center-cropped",
        choices=("random", "center"),
    )
    saliency: str = option(
        "",
        "crop around the salient part of an image: opencv (extra saliency), or an installed package's entry point in "
        "the group diff_dalle.saliency; empty = in the center, random_crop or bucket_crop",
    )
    random_crop: bool = option(False, "random crop, 80–100 % of the shorter side, instead of a center crop")
    random_flip: bool = option(False, "horizontal flip, p = 0.5; unsuitable where captions mention left or right")
    max_broken: float = option(
        0.02, "maximum fraction of broken samples, which are replaced; the run stops above it", free=True
    )
    streams: int = option(
        0,
        "interleaved streams of an epoch, which determine its order; 0 = 8, or the next multiple of the nodes",
        most=MAX_PROCESSES,
    )
    num_workers: int | None = workers_option()
    index_cache: str = option("", "folder for the index of the shards; empty = beside the shards", free=True)
    shard_cache: str = option("", "folder for copies of remote shards; empty = the user's cache", free=True)


@settings
class LoopSection:
    """Loop"""

    seed: int = option(0, "seed of the data order and of all random numbers", most=MAX_SEED)
    weight_decay: float = option(0.01, "decoupled weight decay of linear and convolution weights", free=True)
    adam_beta2: float = option(0.999, "AdamW beta2, decay of the second moment", free=True)
    lr_anneal: str | None = option(
        None,
        "decay of the learning rate to 0 at the last update; none = constant",
        choices=("linear", "cosine"),
        free=True,
    )
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", free=True)
    hours: float = option(
        0.0, "save and stop after this many hours of the session; 0 = no limit", free=True, most=MAX_SECONDS
    )
    compile: bool | None = option(
        None, "compile the network's blocks with torch.compile; auto = on CUDA with Triton", free=True
    )
    log_interval: int = option(50, "updates between log lines", free=True, least=1)
    eval_interval: int = option(
        1000, "updates between evaluations on val_path", free=True, needs=("val_path",), least=1
    )
    eval_samples: int = option(
        1024,
        "maximum number of held-out samples per evaluation",
        free=True,
        needs=("val_path",),
        least=1,
        most=MAX_BATCH,
    )
    keep_best: bool = option(
        False, "keep the weights with the lowest held-out loss as best.pt", free=True, needs=("val_path",)
    )
    keep_checkpoints: int = option(2, "number of latest checkpoints to keep beside backups; 0 = all", free=True)
    preview_samples: int = option(8, "preview images at every save_every; 0 = none", free=True, least=0, most=MAX_BATCH)
    preview_share: float | None = preview_share_option()
    resume_checkpoint: str = option(
        "", "checkpoint file of another run to start from: its weights, optimizer, averages and step", free=True
    )
    accept_changed_data: bool = option(
        False, "resume although the shards of webdataset_path are not those of the checkpoint", free=True
    )
    accept_changed_batch: bool = option(False, "resume although batch_size is not that of the checkpoint", free=True)

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: check_seeds([self.seed]), "seed")
