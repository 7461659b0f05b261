"""The settings that people set: those that ``--help`` shows, where a command has too many to read. ``--help_all`` shows
all."""

MOST = 40  # a command with no more flags shows them all

_NAMES = """
model_path data_dir val_data_dir caption_field random_flip logdir init_checkpoint
webdataset_path experiment_id checkpoint_path output_path generator_checkpoint_path effnet_checkpoint_path
stage_a_checkpoint_path val_path captions_getter model_version
iterations hours batch_size microbatch lr ema_rate precision seed save_interval sample_interval
parallel updates save_every backup_every dtype grad_accum_steps multi_aspect_ratio use_fsdp
network image_size small_size num_channels channel_mult enc_attn_dim text_length
noise_schedule prediction classifier_width classifier_depth
rank train_tokens module_filters prior_data_dir controlnet_filter
prompts prompts_file negative_prompt num_samples sampler steps guidance_scale sample_size upsampler_paths
upsampler_steps stage_b stage_a lora init_image mask strength images controlnet control_image classifier_path
classifier_scale evaluators shapes_dir report_dir metrics
gpu gpus global_batch images budget device
"""
COMMON = frozenset(_NAMES.split())
