"""The sections of a decoder's file, and the rules between them."""

import dataclasses
import re
from pathlib import Path

import pytest
from checkpoint_making import make_classifier_file, make_file
from decoder_file_making import UNET, changed, read_run_file, write_file

from diff_dalle.commands.command_line import parse
from diff_dalle.config import InputError, to_dict
from diff_dalle.recipes.decoder import DecoderRun

PUBLISHED = Path(__file__).parents[2] / "record" / "given" / "documented"
EXAMPLE = ["--preset", "decoder_example"]
CLIP = {"make": "diff_dalle", "model": "clip.pt"}
TEXT = {**UNET, "cond_on_text_encodings": True, "text_embed_dim": 5}
TWO = [("decoder.unets", [UNET, UNET]), ("decoder.image_sizes", [8, 16])]
SIGHTED = ("decoder.unets", [UNET, {**UNET, "cond_on_image_embeds": True}])
CROP = {"RandomResizedCrop": {"size": 8}}


def errors_of(path: str, *flags: str) -> list[str]:
    with pytest.raises(InputError) as error:
        read_run_file(path, *flags)
    return str(error.value).splitlines()


def test_the_documented_example_is_read_as_it_is():
    run = parse(DecoderRun, EXAMPLE)
    assert run.decoder.unets[0].attn_heads == 16 and run.data.splits.train == 0.75 and run.trained == [0]
    assert [each.name for each in run.data.preprocessing] == ["RandomResizedCrop", "ToTensor"]
    recipe = run.recipe()
    (optim,) = recipe.optims.values()
    assert (optim.lr, optim.weight_decay, optim.grad_clip, optim.adam_beta2) == (1e-4, 0.01, 0.5, 0.99)
    assert optim.ema_rate[0] == pytest.approx(0.99**0.1, abs=1e-6)
    assert recipe.training.precision == "fp32" and recipe.distributed.device == "cuda"
    assert recipe.tracking.trackers == ("console", "log", "csv", "jsonl", "samples", "wandb")


def test_the_example_as_runs_record_it_means_the_same():
    """With every setting and its default, as other projects' runs write their file."""
    recorded, example = read_run_file(str(PUBLISHED / "decoder_recorded.json")), parse(DecoderRun, EXAMPLE)
    (unet,) = example.decoder.unets
    unet = dataclasses.replace(unet, cond_on_text_encodings=None)
    decoder = dataclasses.replace(example.decoder, unets=(unet,))
    tracker = dataclasses.replace(example.tracker, data_path=".tracker_data")
    assert recorded == dataclasses.replace(example, tracker=tracker, decoder=decoder)


def test_keys_that_ask_for_nothing_are_accepted_and_others_say_what_is(tmp_path):
    unet = {**UNET, "lowres_cond": False, "lowres_noise_cond": False, "channels_out": None, "out_dim": None}
    constructor = {
        "vae": [], "auto_normalize_img": True, "clip_adapter_overrides": {}, "image_size": 7, "beta_schedule": None,
        "predict_x_start_for_latent_diffusion": False,
    }  # fmt: skip
    changes = [("decoder.unets", [unet]), *((f"decoder.{key}", value) for key, value in constructor.items())]
    plain = dataclasses.replace(read_run_file(write_file(tmp_path)).decoder, image_size=7, beta_schedule=None)
    assert read_run_file(write_file(tmp_path, *changes)).decoder == plain
    log = {"log_type": "console", "resume": True}
    load = {"load_from": "local", "file_path": "x.pth", "only_auto_resume": True}
    save = {"save_to": "local", "save_latest_to": "x.pth", "save_best_to": False, "save_all": False}
    given = {"tracker.log": log, "tracker.load": load, "tracker.save": save, "train.device": "cuda:1"}
    run = read_run_file(write_file(tmp_path, *given.items(), ("train.static_graph", False)))
    assert run.recipe().distributed.device == "cuda:1" and run.tracker.save[0].save_best_to is None
    wandb = {"log_type": "wandb", "wandb_entity": "e", "wandb_project": "p", "wandb_run_id": "id"}
    assert read_run_file(write_file(tmp_path, ("tracker.log", wandb))).recipe().tracking.wandb_run_id == ""
    wrong = {"decoder.vae": [{}], "train.save_immediately": True, "train.static_graph": 1, "decoder.image_sizes": []}
    lines = errors_of(write_file(tmp_path, ("decoder.unets", [{**UNET, "lowres_cond": True}]), *wrong.items()))
    accepted = ["lowres_cond .*; accepted is false or null", r"vae .*; accepted is \[\] or null"]
    accepted += [
        "save_immediately .* not supported: .*; accepted is false",
        "static_graph .*; accepted is true or false",
    ]
    assert len(lines) == 6 and all(any(re.search(rule, line) for line in lines) for rule in accepted)


def test_what_is_wrong_with_a_process_is_told_once_by_the_files_names(tmp_path):
    steps = ("decoder.timesteps", 10), ("decoder.sample_timesteps", None)
    lines = errors_of(
        write_file(tmp_path, *steps, ("decoder.beta_schedule", "linear"), ("train.unet_training_mask", []))
    )
    assert len(lines) == 3 and "decoder.timesteps (" in lines[1] and "unet_training_mask" in lines[2]
    assert lines[1].endswith("betas up to 2, above 1: set it to 20 or more, or decoder.beta_schedule to cosine")


def test_the_schedule_is_cosine_unless_null_is_given(tmp_path):
    text, code = (
        [stage.diffusion.noise_schedule for stage in read_run_file(write_file(tmp_path, *TWO, *given)).decoder.stages()]
        for given in ((), [("decoder.beta_schedule", None)])
    )
    assert text == ["cosine", "cosine"] and code == ["cosine", "linear"]


def test_the_smoke_test_is_read_as_it_is():
    run = read_run_file(str(PUBLISHED / "decoder_smoke.json"))
    assert run.decoder.clip.model == "ViT-L/14" and run.train.epoch_samples == 50 and run.data.resample_train


def test_a_users_cascade_gets_everything_that_is_wrong_at_once():
    lines = errors_of(str(PUBLISHED / "decoder_wrong.json"))
    assert lines[0] == "4 settings are wrong:"
    assert [re.sub(r"\([^)]*/(decoder_wrong.json, line \d+)\) .*", r"\1", line).strip() for line in lines[1:]] == [
        "decoder.clip decoder_wrong.json, line 36", "data.preprocessing decoder_wrong.json, line 63",
        "train.device decoder_wrong.json, line 79", "train.unet_training_mask decoder_wrong.json, line 85",
    ]  # fmt: skip
    assert "sees images of 224 pixels" in lines[1] and "but data.preprocessing makes 128: raise" in lines[1]
    assert "makes images of 128 pixels, but the U-Nets that are trained need 256" in lines[2]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in lines[3] and "mpiexec -n 4" in lines[3]
    assert "has 1 entry, but decoder.unets has 2 U-Nets" in lines[4]


def test_its_corrected_form_is_a_preset():
    run = parse(DecoderRun, ["--preset", "decoder_two_stage"])
    assert run.trained == [0, 1] and run.image_size == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("data.splits.train", 1.5)], "data.splits.train is 1.5, but must be above 0 and at most 1"),
        ([("train.warmup_steps", [3]), ("train.cosine_decay_max_steps", 2)], "warmup_steps of U-Net 0 is 3, but must"),
        ([("train.epoch_samples", 0)], "epoch_samples is 0, but must be at least 1"),
        ([("train.validation_samples", 0)], "validation_samples is 0, but must be at least 1"),
        ([("train.n_sample_images", -1)], "n_sample_images is -1, but must be at least 0"),
        ([("train.cond_scale", [1, 3]), ("decoder.image_cond_drop_prob", 0)], "has 3 for U-Net 0, which drops no"),
        ([("train.cond_scale", [1, -3])], "cond_scale has -3, but must not be negative"),
        ([("train.cond_scale", [1, 3, 3])], "cond_scale has 3 twice for U-Net 0"),
        ([("train.cond_scale", [[]])], "cond_scale has an empty list"),
        ([("train.cond_scale", [1, 3]), *TWO], "train.cond_scale has 3 for U-Net 1, which drops no condition"),
        ([("train.cond_scale", [[1, 3], [1, 2, 3]]), *TWO[1:], SIGHTED], "has 2, 3 scales for the U-Nets"),
        ([("train.validation_samples", 3), ("data.splits", {"train": 1, "val": 0, "test": 0})], "data.splits.val is 0"),
        (
            [("decoder.unets", [TEXT]), ("decoder.clip", CLIP), ("data.img_embeddings_url", "x"),
             ("data.text_embeddings_url", "y")],
            "data.img_embeddings_url and data.text_embeddings_url is given beside decoder.clip",
        ),
        ([("evaluate", {"FID": {"feature": "clip"}})], "evaluate has the feature clip, but there is no decoder.clip"),
        ([("tracker.save", {"save_to": "wandb", "save_latest_to": "x"})], "set tracker.save[0].wandb_run_path"),
        ([("tracker.save.save_best_to", "b"), ("data.splits", {"train": 1, "val": 0, "test": 0})], "no validation"),
        ([("seed", -1)], "seed is -1, but must lie between 0"),
    ],
)  # fmt: skip
def test_rules(tmp_path, changes, message):
    """Beside those whose messages ``record`` holds."""
    place = re.compile(rf" \({re.escape(str(tmp_path))}/decoder.json, line 1\)")
    assert message in place.sub("", "\n".join(errors_of(write_file(tmp_path, *changes, world="{}.tar"))))


@pytest.mark.parametrize(
    "changes",
    [
        [("data.splits", {"train": 0.7, "val": 0.2, "test": 0.1})],
        [("data.resample_train", True), ("data.shuffle_train", False)],
        [("data.preprocessing", {**CROP, "ToTensor": True, "RandomHorizontalFlip": False})],
        [("decoder.clip", CLIP), ("decoder.unets", [TEXT]), ("data.text_embeddings_url", "x")],
        [("decoder.unets", [TEXT]), ("data.text_embeddings_url", "x"), ("data.img_embeddings_url", "y")],
        [("decoder.unets", [UNET, UNET]), ("decoder.image_sizes", [8, 16]), ("train.unet_training_mask", [True, False]),
         ("data.preprocessing", CROP)],
        [("train.lr", [1e-3]), ("train.warmup_steps", None), ("train.max_grad_norm", None)],
        [("train.device", "cuda:0")],
        [("tracker.log", [{"log_type": "console"}, {"log_type": "tensorboard"}])],
    ],
)  # fmt: skip
def test_what_the_rules_allow(tmp_path, changes):
    read_run_file(write_file(tmp_path, *changes, world="{}.tar"))


def test_lists_are_for_each_unet(tmp_path):
    changes = [
        ("decoder.unets", [UNET] * 3), ("decoder.image_sizes", [8, 16, 32]),
        ("train.unet_training_mask", [True, False, True]),
        ("train.lr", [1e-3, 2e-3, 3e-3]), ("train.wd", 0.5), ("train.warmup_steps", [None, 5, 6]),
        ("train.max_grad_norm", [1, None, 2]), ("train.ema_beta", [0.9, 0.8, 0.7]), ("train.ema_update_every", 1),
        ("train.cosine_decay_max_steps", [None, None, 100]), ("train.cond_scale", [3, 1, 1]),
    ]  # fmt: skip
    run = read_run_file(write_file(tmp_path, *changes, world="{}.tar"))
    optims = list(run.recipe().optims.values())
    assert [optim.lr for optim in optims] == [1e-3, 2e-3, 3e-3] and run.trained == [0, 2] and run.image_size == 32
    first = ("train.unet_training_mask", [True, False, False])  # the others' images may be larger
    assert read_run_file(write_file(tmp_path, *changes, first, world="{}.tar")).image_size == 8
    assert [optim.weight_decay for optim in optims] == [0.5] * 3
    assert [optim.warmup_steps for optim in optims] == [0, 5, 6]
    assert [optim.grad_clip for optim in optims] == [1, 0, 2]
    assert [optim.ema_rate for optim in optims] == [(0.9,), (0.8,), (0.7,)]
    assert [(optim.lr_anneal_steps, optim.lr_anneal) for optim in optims] == [(0, "cosine")] * 2 + [(100, "cosine")]
    assert [run.train.scales(i, 3, True) for i in range(3)] == [(3,), (1,), (1,)]


def test_one_guidance_scale_is_for_those_that_drop_conditions(tmp_path):
    run = read_run_file(write_file(tmp_path, ("train.cond_scale", 3), world="{}.tar"))
    assert run.train.scales(0, 2, True) == (3,) and run.train.scales(1, 2, False) == (1,)


@pytest.mark.parametrize(
    ("given", "count", "expected"),
    [
        ([1, 3], 1, [(1, 3)]),
        ([[1, 3]], 1, [(1, 3)]),
        ([[1, 3]], 2, [(1, 3), (1,)]),
        ([[1, 3], 1], 2, [(1, 3), (1,)]),
        ([2, 1], 2, [(2,), (1,)]),
    ],
)
def test_scales_to_compare(tmp_path, given, count, expected):
    """A list in place of a scale; for a single U-Net, any list. The second U-Net drops nothing."""
    changes = [("decoder.unets", [UNET] * count), ("decoder.image_sizes", [8, 16][:count])]
    run = read_run_file(write_file(tmp_path, *changes, ("train.cond_scale", given), world="{}.tar"))
    assert [run.scales(i) for i in range(count)] == expected


def test_set_reaches_every_section(tmp_path):
    flags = ["decoder.unets.0.dim=16", "data.splits.train=0.5", "train.lr=1e-4,", "tracker.log.log_type=tensorboard"]
    flags += ["data.preprocessing.Resize.size=9", "tracker.save.0.save_latest_to=x.pth", "seed=7"]
    path = write_file(tmp_path, ("data.preprocessing", {}), world="{}.tar")
    run = read_run_file(path, *[part for flag in flags for part in ("--set", flag)])
    assert run.decoder.unets[0].dim == 16 and run.train.lr == (1e-4,) and run.seed == 7
    assert run.tracker.log[0].log_type == "tensorboard" and run.data.preprocessing[0].size == (9,)
    assert run.tracker.save[0].save_latest_to == "x.pth"


def test_a_run_is_recorded_without_its_place(tmp_path):
    run = read_run_file(write_file(tmp_path, world="{}.tar"))
    config = run.without_place(to_dict(run))
    assert "data_path" not in config["tracker"] and config["decoder"] == to_dict(run.decoder)
    assert changed()["train"]["epochs"] == config["train"]["epochs"]


def test_the_device_is_that_of_the_file_or_the_flag(tmp_path):
    path = write_file(tmp_path, ("train.device", "cpu"), world="{}.tar")
    assert read_run_file(path).recipe().distributed.device == "cpu"
    assert read_run_file(path, "--device", "cpu").recipe().distributed.device == "cpu"
    assert read_run_file(path, "--device", "cuda").recipe().distributed.device == "cuda"  # a flag overrides a file
    path = write_file(tmp_path, ("train.device", "auto"), world="{}.tar")
    assert read_run_file(path, "--device", "cuda").recipe().distributed.device == "cuda"


@pytest.mark.parametrize(
    ("make", "model", "side"),
    [("openai", "ViT-L/14", 224), ("openai", "ViT-L/14@336px:file.pt", 336), ("openai", "RN50x16", 384)],
)
def test_crops_are_as_large_as_a_clip_sees_known_by_name(tmp_path, make, model, side):
    clip = ("decoder.clip", {"make": make, "model": model})
    for size in (side, side - 1):
        path = write_file(tmp_path, clip, ("data.preprocessing", {"CenterCrop": {"size": size}}), world="{}.tar")
        if size == side:
            read_run_file(path)
        else:
            (line,) = errors_of(path)
            assert f"sees images of {side} pixels" in line and f"makes {size}: raise its size" in line


def test_crops_are_as_large_as_a_clip_of_ours_sees_known_from_its_file(tmp_path):
    clip = ("decoder.clip", {"make": "diff_dalle", "model": make_classifier_file(tmp_path, noised=False)})
    crop = ("data.preprocessing", {"CenterCrop": {"size": 15}})
    (line,) = errors_of(write_file(tmp_path, clip, crop, world="{}.tar"))
    assert line.startswith("decoder.clip (") and "sees images of 16 pixels, but data.preprocessing makes" in line
    read_run_file(write_file(tmp_path, clip, ("data.preprocessing", {"CenterCrop": {"size": 16}}), world="{}.tar"))
    read_run_file(write_file(tmp_path, clip, crop, ("decoder.unconditional", True), world="{}.tar"))
    other = ("decoder.clip", {"make": "diff_dalle", "model": make_file(tmp_path)})
    assert "holds a generator, but a classifier is required" in errors_of(write_file(tmp_path, other, crop))[0]
