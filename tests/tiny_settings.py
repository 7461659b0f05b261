"""Settings of networks and runs that take seconds."""

GENERATOR = {
    "image_size": 16,
    "num_channels": 16,
    "channel_mult": "1,2",
    "num_res_blocks": 1,
    "attention_resolutions": 8,
    "enc_attn_dim": 16,
    "enc_depth": 1,
    "enc_heads": 2,
}
# In place of the U-Net of GENERATOR, whose flags are left out.
TRANSFORMER = {
    "network": "transformer",
    "patch_size": 4,
    "depth": 3,
    "separate_blocks": 1,
    "patch_channels": 8,
    "output_conv": 4,
    "position_patches": 4,
    "route_share": 0.5,
    "route_blocks": "1,2",
    **dict.fromkeys(("channel_mult", "num_res_blocks", "attention_resolutions")),
}
CLASSIFIER = {
    "image_size": 16,
    "classifier_width": 16,
    "classifier_channel_mult": "1,2",
    "classifier_depth": 1,
    "classifier_attention_resolutions": 8,
    "classifier_enc_attn_dim": 16,
    "classifier_enc_depth": 1,
    "classifier_enc_heads": 2,
}
RUN = {
    "noise_schedule": "cosine",
    "log_interval": 1,
    "num_workers": 1,
    "ema_rate": 0.9,
    "precision": "fp32",
    "device": "cpu",
    "threads": 1,
}
# Runs whose result depends on the random numbers of data and network.
GENERATOR_RUN = {**GENERATOR, **RUN, "dropout": 0.1, "random_flip": True, "sample_interval": 0}
CLASSIFIER_RUN = {**CLASSIFIER, **RUN, "classifier_dropout": 0.1, "lr": 3e-3}


def flags(settings):
    return [str(part) for name, value in settings.items() if value is not None for part in (f"--{name}", value)]
