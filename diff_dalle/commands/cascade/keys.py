"""The documented keys of a cascade's file that are no settings of their own here, and what shared code calls others."""

from __future__ import annotations

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
#: What messages of shared code call by flags that this command does not have; see ``commands.spelling``.
RENAMED = {
    "data_dir": "webdataset_path",
    "val_data_dir": "data.val_path",
    "logdir": "experiment_id",
    "caption_field": "captions_getter",
    "init_checkpoint": "generator_checkpoint_path",
    "iterations": "updates",
    "warmup_steps": "warmup_updates",
    "microbatch": "grad_accum_steps",
    "remove wandb from --trackers": "leave out wandb_project",
}
