"""The files of a latent cascade: the documented keys, what follows from them, and what is refused."""

from pathlib import Path

import pytest
import yaml
from cascade_file_making import COMMON, content, read, write_file
from refusing import refused

from diff_dalle.checkpoints.kinds import TRAINING_COMMANDS
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sources import preset_names, preset_text
from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.distributed.launch import ProcessInfo
from diff_dalle.distributed.sharding_config import ShardingConfig
from diff_dalle.distributed.world import World
from diff_dalle.models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES

STAGE_B = [("stage_a_checkpoint_path", "a.pt"), ("effnet_checkpoint_path", "s.pt")]
STAGE_C = [("effnet_checkpoint_path", "s.pt")]
DOCUMENTED = (Path(__file__).parents[2] / "record" / "given" / "documented" / "all_keys.yaml").read_text()


def documented(tmp_path, text: str = DOCUMENTED):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return parse_cascade([str(path)])


def test_every_documented_key_arrives_where_it_works(tmp_path):
    """Those that the published files lack; see test_documented_files.py."""
    run = documented(tmp_path)
    assert run.kind == "stage_c" and run.model == STAGE_C_SIZES["3.6B"]  # what is trained follows from the version
    recipe = run.recipe()
    assert recipe.tracking.wandb_run_name == "stage_c_3b_base" and "wandb" in recipe.tracking.trackers
    training, data = recipe.training, recipe.data
    assert training.precision == "bf16" and training.init_checkpoint == ("models/stage_c_bf16.pt",)
    assert recipe.optims[""].warmup_steps == 1
    assert len(data.aspect.multi_aspect_ratio) == 12 and data.aspect.bucketeer_random_ratio == 0.1
    assert data.caption_field == '["json", "captions_getter"]' and len(data.dataset_filters) == 2
    assert run.webdataset_path[1] == "file:/path/to/your/local/dataset.tar"
    assert run.diffusion.loss_weighting == ("adaptive",) and run.image_size == run.trained_with.image_size == 768
    assert run.image_clip_name == "openai/clip-vit-large-patch14"


def test_the_rate_falls_to_0_at_the_last_update_if_told_so(tmp_path):
    optims = [
        read("semantic", tmp_path, "w", ("loop.lr_anneal", each)).recipe().optims[""] for each in ("linear", None)
    ]
    assert [(optim.lr_anneal_steps, optim.lr_anneal) for optim in optims] == [(4, "linear"), (0, "linear")]


def test_what_is_left_out_is_off(tmp_path):
    lines = [line for line in DOCUMENTED.splitlines() if not line.startswith(("ema_", "wandb", "multi", "adaptive"))]
    run = documented(tmp_path, "\n".join(lines))
    recipe = run.recipe()
    assert recipe.optims[""].ema_rate == () and "wandb" not in recipe.tracking.trackers
    assert recipe.data.aspect.multi_aspect_ratio == () and run.diffusion.loss_weighting == ("p2",)


def test_a_size_is_completed_by_what_the_file_says(tmp_path):
    run = read("stage_c", tmp_path, "w", *STAGE_C, ("model", {"widths": [64, 64], "heads": [2, 2]}))
    assert run.model.widths == (64, 64) and run.model.cond_width == STAGE_C_SIZES["1B"].cond_width
    run = read("stage_b", tmp_path, "w", *STAGE_B, ("model", {"text": {"text_length": 20}}))
    assert run.model.text.text_length == 20 and run.model.up_repeats == STAGE_B_SIZES["700M"].up_repeats
    assert run.diffusion.pyramid_noise == 0.75 and run.diffusion.shift == 1  # of stage B
    run = read("stage_b", tmp_path, "w", *STAGE_B, ("shift", 4))
    (note,) = run.notes()
    assert run.diffusion.shift == 1 and note.startswith("shift is 4, but not used: ")
    run = read("stage_b", tmp_path, "w", *STAGE_B, ("shift", 4), ("diffusion.shift", 4))
    assert run.diffusion.shift == 4 and not [*run.notes()]
    run = read("stage_b", tmp_path, "w", *STAGE_B, ("adaptive_loss_weight", False))
    assert run.diffusion.loss_weighting == ("p2",)
    weighting = [("adaptive_loss_weight", None), ("diffusion.loss_weighting", ["snr"])]
    run = read("stage_b", tmp_path, "w", *STAGE_B, *weighting)
    assert run.diffusion.loss_weighting == ("snr",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("save_every", 0), "save_every is 0, but must be at least 1"),
        (("loop", {"seed": -1}), "seed is -1, but must lie between"),
        (("loop", {"log_interval": 0}), "log_interval is 0, but must be at least 1"),
        (("denoising", {"text_dropout": 1.5}), "text_dropout is 1.5, but must be at least 0 and at most 1"),
        (("sampling", {"shift": 0}), "shift is 0, but must be above 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_opened(tmp_path, change, message):
    """Beside what ``record`` holds the messages of."""
    with refused(message):
        read("stage_c", tmp_path, "nowhere", *STAGE_C, change)


@pytest.mark.parametrize("key", [*sorted(COMMON.keys() - {"data", "loop", "distributed", "dtype"}), "experiment_id"])
def test_what_the_document_requires_is_required(tmp_path, key):
    file = content("stage_c", tmp_path, "w", *STAGE_C)
    del file[key]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    with refused(rf"{key} \(.*\) is required"):
        parse_cascade([str(tmp_path / "run.yaml")])


def test_scales_of_semantic_latents_are_a_range(tmp_path):
    for scale in ([0.5], [0, 1], [1, 0.5]):
        with refused("semantic_scale is .* but must be LOW,HIGH"):
            read("stage_b", tmp_path, "w", *STAGE_B, ("denoising", {"semantic_scale": scale}))


def test_the_kind_is_said_or_follows(tmp_path):
    for kind, changes in (("stage_b", STAGE_B), ("stage_c", STAGE_C)):
        file = content(kind, tmp_path, "w", *changes)
        del file["kind"]
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
        assert parse_cascade(["--config_file", str(tmp_path / "run.yaml")]).kind == kind
    file = content("stage_a", tmp_path, "w")
    del file["kind"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    with refused("does not say what is trained: add the line kind: with one of stage_a, sem"):
        parse_cascade([str(tmp_path / "run.yaml")])
    assert parse_cascade([str(tmp_path / "run.yaml"), "--kind", "stage_a"]).kind == "stage_a"
    with refused("no settings are given: name a file"):
        parse_cascade(["--lr", "1e-3"])
    with refused("holds settings for training a stage_a: use it with"):
        parse(TRAINING_COMMANDS["stage_c"].config_class, ["--config", write_file("stage_a", tmp_path, "w")])


def test_flags_win_over_the_file(tmp_path):
    path = write_file("stage_a", tmp_path, "w")
    run = parse_cascade([path, "--lr", "0.5", "--num_workers", "3", "--set", "model.codebook_size=7"])
    assert (run.lr, run.data.num_workers, run.model.codebook_size, run.model.width) == (0.5, 3, 7, 8)


def test_sizes_of_buckets_must_suit_the_networks(tmp_path):
    changes = [("multi_aspect_ratio", ["1/2"]), ("data.bucket_factor", 6)]
    with refused(r"data.bucket_factor is 6, but must be a multiple of 8"):
        read("semantic", tmp_path, "w", *changes)
    assert read("semantic", tmp_path, "w", changes[1]).data.bucket_factor == 6  # without buckets


def test_the_batch_is_that_of_all_processes(tmp_path):
    run = read("stage_a", tmp_path, "w", ("batch_size", 12), ("grad_accum_steps", 2))
    for processes, expected in ((1, (12, 6)), (3, (4, 2))):
        training = run.recipe(processes).training
        assert (training.batch_size, training.microbatch) == expected
    run.recipe(3).open(World(ProcessInfo("mpi", 0, 3), "cpu"))
    with refused(r"batch_size is 12, but must be a multiple of 8: the processes \(4\)"):
        run.recipe(4).open(World(ProcessInfo("mpi", 0, 4), "cpu"))


def test_weights_are_sharded_as_the_file_says(tmp_path):
    """By the documented key, or by all settings of sharding."""

    def sharding(*settings):
        given = [(name, "x.pt") for name in ("effnet_checkpoint_path", "stage_a_checkpoint_path")]
        return read("stage_b", tmp_path, "w", *given, *settings).recipe().training.sharding

    assert sharding() == ShardingConfig() and sharding(("use_fsdp", False)) == ShardingConfig()
    assert sharding(("use_fsdp", True)) == ShardingConfig("fsdp")
    hybrid = ("sharding", {"parallel": "hsdp", "shard_processes": 4})
    assert sharding(("use_fsdp", True), hybrid) == sharding(hybrid) == ShardingConfig("hsdp", 4)


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("cascade_")])
def test_presets_are_files_of_the_command(tmp_path, name):
    (tmp_path / "run.yaml").write_text(preset_text(name))
    assert parse_cascade([str(tmp_path / "run.yaml")]) == parse_cascade(["--preset", name])
