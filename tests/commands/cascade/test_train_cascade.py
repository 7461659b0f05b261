"""Training all four kinds of a latent cascade from their files: resuming, processes, frozen networks, previews."""

import csv
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cascade_file_making import SIDE, UNET, frozen_of, make_world, read, run, write_file
from checkpoint_making import make_classifier_file
from marks import slow
from PIL import Image
from script_running import run as run_script
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands.info import describe_file
from diff_dalle.commands.sources import preset_text
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.cascade.session import identity_of, load_semantic, load_stage_a
from diff_dalle.recipes.train import train_recipe

KINDS = ("stage_a", "semantic", "stage_b", "stage_c")
QUIET = ("loop.preview_samples", 0)
EMA = [("ema_start_iters", 1), ("ema_iters", 2), ("ema_beta", 0.5)]
RATIOS = [("multi_aspect_ratio", ["1/1", "1/2"]), ("data.bucket_factor", 8), ("bucketeer_random_ratio", 0.5)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return make_classifier_file(tmp_path_factory.mktemp("clip"), noised=False)


def weights(path) -> torch.Tensor:
    state = load_file(str(path))["state"]
    return torch.cat([value.flatten().double() for value in state.values()])


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "run" / "progress.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def three(kind, frozen, *changes) -> list:
    """Changes for three updates without previews."""
    own = [("updates", 3), ("save_every", 1), ("loop.keep_checkpoints", 0)]
    return [*frozen_of(kind, frozen), *EMA, *RATIOS, QUIET, *own, *changes]


@pytest.fixture(scope="module", params=KINDS)
def begun(request, tmp_path_factory, world, frozen):
    """A kind, the folder of three updates at once, and that of the first of them."""
    whole, first = (tmp_path_factory.mktemp(name) for name in ("whole", "first"))
    run(request.param, whole, world, *three(request.param, frozen))
    run(request.param, first, world, *three(request.param, frozen, ("updates", 1)))
    return request.param, whole, first


def same_weights(one: Path, other: Path) -> None:
    """To rounding."""
    one, other = (weights(folder / "run" / "model000003.pt") for folder in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("begun", ["stage_a", slow("semantic"), slow("stage_b"), "stage_c"], indirect=True)
def test_accumulated_updates_are_those_of_the_whole_batch(tmp_path, world, frozen, begun):
    kind, whole, _ = begun
    run(kind, tmp_path, world, *three(kind, frozen, ("grad_accum_steps", 2)))
    same_weights(whole, tmp_path)


@pytest.mark.parametrize(
    "begun",
    ["stage_c", *(slow(kind) for kind in KINDS if kind != "stage_c")],
    indirect=True,
)
def test_processes_may_come_and_go(tmp_path, world, frozen, begun):
    """One process, then two, then one: the same run, to rounding."""
    kind, whole, first = begun
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    path = write_file(kind, tmp_path, world, *three(kind, frozen, ("updates", 2)))
    assert "Resuming at step 1" in run_script("train_cascade.py", path, ranks=2).stdout
    run(kind, tmp_path, world, *three(kind, frozen))
    same_weights(whole, tmp_path)


@pytest.mark.parametrize("begun", ["stage_b"], indirect=True)
def test_what_frozen_networks_it_was_trained_with_is_recorded(frozen, begun):
    path = str(begun[1] / "run" / "model000003.pt")
    settings = open_network(path, "stage_b").settings
    known = settings.trained_with
    stage_a = load_stage_a(frozen["stage_a_checkpoint_path"], torch.device("cpu"))
    semantic = load_semantic(frozen["effnet_checkpoint_path"], torch.device("cpu"))
    assert known.stage_a == identity_of(stage_a) != identity_of(semantic) == known.semantic != ""
    assert (known.stage_a_stride, known.semantic_stride, known.image_size) == (4, 8, SIDE)
    assert known.text_clip is None and known.image_clip is None
    text = describe_file(path)
    assert f"with stage A {known.stage_a}, semantic encoder {known.semantic}" in text
    assert "predicts eps on the schedule cosine; sampled by ancestral in 2 steps, guidance scale 1.1, shift 1" in text
    assert "GFLOPs for a forward pass over one image of 32×32 pixels" in text
    signal = settings.signal
    assert (signal.channels, signal.scale, signal.value_range) == (4, 4, None)
    with pytest.raises(InputError, match="latents become pictures by stage A, but there is none"):
        signal.to_pixels(torch.zeros(1, 4, 2, 2))


def test_other_frozen_networks_than_those_at_the_start_are_refused(tmp_path, world, frozen):
    """Not only of the folder's run: a file may say which ones it is about."""
    changes = [*frozen_of("stage_b", frozen), QUIET]
    run("stage_b", tmp_path, world, *changes, ("updates", 1))
    for name, kind in (("stage_a", "stage_a"), ("effnet", "semantic")):
        run(kind, tmp_path / kind, world, QUIET, ("updates", 1), ("loop.seed", 7))
        other = (f"{name}_checkpoint_path", str(tmp_path / kind / "run" / "model000001.pt"))
        with pytest.raises(InputError, match=rf"holds a run with other settings: trained_with.{kind} \("):
            run("stage_b", tmp_path, world, *changes, other)
        known = ("trained_with", {kind: "0123456789abcdef"})
        with pytest.raises(InputError, match=rf"{name}_checkpoint_path is .*the run was begun with 0123456789abcdef"):
            run("stage_b", tmp_path / "new", world, *changes, known)


def test_networks_that_do_not_fit_are_refused_before_training(tmp_path, world, frozen):
    changes = frozen_of("stage_b", frozen)
    for change, message in (
        (("model.channels", 3), "model.channels is 3, but the latents of stage A have 4 channels"),
        (
            ("model.semantic_channels", 8),
            "model.semantic_channels is 8, but the latents of the semantic encoder have 16",
        ),
        (("image_size", 36), "image_size is 36, but must be a multiple of 8"),
        (("effnet_checkpoint_path", frozen["stage_a_checkpoint_path"]), "holds a stage_a, but a semantic is required"),
    ):
        with pytest.raises(InputError, match=message):
            read("stage_b", tmp_path, world, *changes, change).recipe().open(ALONE)
    with pytest.raises(InputError, match="model.channels is 3, but the latents of the semantic encoder have 16"):
        read("stage_c", tmp_path, world, *frozen_of("stage_c", frozen), ("model.channels", 3)).recipe().open(ALONE)


def test_levels_at_half_the_resolution_need_no_even_sides(tmp_path, world, frozen):
    """40 pixels are 5 positions of the semantic latents."""
    changes = (("image_size", 40), ("model.switch_level", [True]), ("updates", 1))
    settings = run("stage_c", tmp_path, world, *frozen_of("stage_c", frozen), *changes)
    assert settings.recipe().open(ALONE).settings.trained_with.semantic_stride == 8


# ----------------------------------------------------------------------------------------------------------------- text


def clip_changes(clip) -> list:
    """The network's text and images are encoded by a CLIP."""
    own = {**UNET, "micro_conditions": [], "text": {"enc_attn_dim": 0, "text_length": 12}}
    widths = {"text_width": 16, "pooled_width": 16, "image_width": 16}
    names = [("clip_text_model_name", clip), ("clip_image_model_name", clip)]
    return [("model", {**own, **widths}), *names]


def test_a_frozen_clip_encodes_text_and_images(tmp_path, world, frozen, clip):
    changes = [*frozen_of("stage_c", frozen), *clip_changes(clip)]
    for updates in (1, 2):  # resumes
        run("stage_c", tmp_path, world, *changes, ("updates", updates))
    saved = open_network(str(tmp_path / "run" / "model000002.pt"), "stage_c")
    known = saved.settings.trained_with
    assert known.text_clip == known.image_clip and known.text_clip.identity.startswith("diff_dalle:")
    assert saved.tokenizer is None and (tmp_path / "out" / "run" / "samples_000002.png").is_file()
    assert f"CLIP of texts diff_dalle {clip}" in describe_file(saved.path)
    own = {**dict(changes)["model"], "pixel_channels": 0}
    del own["text_width"], own["image_width"]
    b = [*frozen_of("stage_b", frozen), ("model", own), ("clip_text_model_name", clip)]
    run("stage_b", tmp_path / "b", world, *b, ("updates", 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("model.text_width", 5), "model.text_width is 5, but the CLIP .* has 16"),
        (("model.pooled_width", 5), "model.pooled_width is 5, but the CLIP .* has 16"),
        (("model.image_width", 5), "model.image_width is 5, but the CLIP .* makes embeddings of 16 elements"),
        (("model.text.text_length", 11), "model.text.text_length is 11, but the CLIP .* reads 12 tokens"),
        (("clip_text_model_name", "nothing"), "the CLIP model is 'nothing', but must be spelled MODEL/TAG|open_clip"),
        (("trained_with", {"text_clip": {"identity": "x"}}), "clip_text_model_name is .* but the run has .*x"),
    ],
)
def test_a_clip_that_does_not_fit_is_refused(tmp_path, world, frozen, clip, change, message):
    with pytest.raises(InputError, match=message):
        settings = read("stage_c", tmp_path, world, *frozen_of("stage_c", frozen), *clip_changes(clip), change)
        settings.recipe().open(ALONE)


# ------------------------------------------------------------------------------------------------- the documented keys


def test_the_discriminator_has_an_optimizer_of_its_own(tmp_path, world):
    """Without weight decay, which would move it before it begins."""
    for given, expected in ((None, 1e-3), (0.25, 0.25)):
        settings = read("stage_a", tmp_path, world, ("autoencoding.discriminator_lr", given), QUIET)
        session = settings.recipe().open(ALONE)
        (trainee,) = session.trainees(session.both_loaders[0])
        own, other = (trainee.optimizations[part].config for part in ("", "discriminator"))
        assert (own.lr, own.weight_decay, own.ema_rate) == (1e-3, 0.01, session.recipe.optims[""].ema_rate)
        assert (other.lr, other.weight_decay, other.ema_rate) == (expected, 0.0, ())


@pytest.mark.parametrize("kind", KINDS)
def test_previews_and_evaluations_of_batches_of_several_aspect_ratios(tmp_path, frozen, kind):
    """With averages, stages B and C show samples of both weights."""
    tall = make_world(tmp_path / "shards", 1, (64, 30))
    files = []
    for i in range(12):
        files += [(f"{i:02d}.jpg", encoded(random_image(30, 64, i))), (f"{i:02d}.txt", f"wide {i}".encode())]
    (tmp_path / "shards" / "wide.tar").write_bytes(tar_bytes(files))
    changes = [*frozen_of(kind, frozen), *EMA, *RATIOS, ("bucketeer_random_ratio", 0.0)]
    changes += [("data.val_path", tall), ("loop.eval_interval", 2), ("loop.eval_samples", 8), ("loop.keep_best", True)]
    settings = run(kind, tmp_path, tall, *changes)
    batches = settings.recipe().open(ALONE).both_loaders[0].batches(0)
    assert {next(batches).images.shape[2:] for _ in range(8)} == {(16, 40), (40, 16)}
    name, lines = {"stage_a": ("reconstructions", 3), "semantic": ("previews", 2)}.get(kind, ("samples", 6))
    folder = tmp_path / "out" / "run"
    expected = [f"{name}_00000{step}.png" for step in (2, 4)]
    expected += ["samples_table.txt"] if kind in ("stage_b", "stage_c") else []
    assert sorted(path.name for path in folder.iterdir()) == expected
    grid = np.asarray(Image.open(folder / f"{name}_000004.png"))
    assert grid.shape == (lines * (2 * 16 + 4) + 4, 2 * (2 * 40 + 4) + 4, 3)
    measured = [row for row in rows(tmp_path) if row["held_out/loss"]]
    assert len(measured) == 2 and (tmp_path / "run" / "best.pt").is_file()
    expected = {"stage_a": "psnr", "semantic": "psnr", "stage_b": "semantic_drop_gap", "stage_c": "caption_swap_gap"}
    assert float(measured[-1][f"held_out/{expected[kind]}"]) != 0
    assert (tmp_path / "run" / "loss_by_log_snr.png").is_file() == (kind in ("stage_b", "stage_c"))


@pytest.mark.parametrize("kind", ["stage_b", "stage_c"])
def test_captions_and_the_loss_by_log_snr_need_no_held_out_data(tmp_path, world, frozen, kind):
    """And change nothing of what is trained."""
    changes = [*frozen_of(kind, frozen), ("adaptive_loss_weight", False), ("updates", 2)]
    run(kind, tmp_path / "shown", world, *changes)
    run(kind, tmp_path / "quiet", world, *changes, QUIET)
    shown, quiet = (tmp_path / name / "run" for name in ("shown", "quiet"))
    assert torch.equal(weights(shown / "model000002.pt"), weights(quiet / "model000002.pt"))
    assert (shown / "training_loss_by_log_snr.png").is_file() and not (shown / "loss_by_log_snr.png").exists()
    assert not (quiet / "training_loss_by_log_snr.png").exists()
    first = read(kind, tmp_path, world, *changes).recipe().open(ALONE).both_loaders[0]
    lines = (tmp_path / "shown" / "out" / "run" / "samples_table.txt").read_text().splitlines()
    keys = [int(first.describe(position).rpartition(" ")[2]) for position in range(2)]
    assert lines == [f"picture {key}" for key in keys]


@pytest.mark.parametrize("names", [("stage_c_3b", "stage_c_1b"), ("stage_b_3b", "stage_b_700m")])
def test_the_documented_files_train_at_tiny_width(tmp_path, world, frozen, clip, names, monkeypatch):
    """With all of their keys; the second from the weights of the first, on a list of sources, told to wandb."""
    for variable, value in (("MODE", "offline"), ("SILENT", "true"), ("DATA_DIR", str(tmp_path / "wandb"))):
        monkeypatch.setenv(f"WANDB_{variable}", value)
    kind = names[0][:7]
    own = {**UNET, "micro_conditions": [], "text": {"enc_attn_dim": 0, "text_length": 12}, "pooled_width": 16}
    own |= {"text_width": 16, "image_width": 16} if kind == "stage_c" else {"pixel_channels": 0}
    given = {"checkpoint_path": str(tmp_path), "output_path": str(tmp_path / "out"), "webdataset_path": world}
    given |= {"batch_size": 4, "image_size": SIDE, "updates": 2, "save_every": 1, "model": own}
    given |= {"data": {"num_workers": 0, "bucket_factor": 8}, "loop": {"preview_samples": 2}, "sampling": {"steps": 2}}
    given |= {"distributed": {"device": "cpu", "threads": 1}, "clip_text_model_name": clip, "use_fsdp": True}
    given |= {"clip_image_model_name": clip} if kind == "stage_c" else {"shift": 4}
    given |= {"previewer_checkpoint_path": frozen["effnet_checkpoint_path"]} if kind == "stage_c" else {}
    files = [
        {**yaml.safe_load(preset_text(f"cascade_{name}")), **dict(frozen_of(kind, frozen)), **given} for name in names
    ]
    files[1] |= {
        "generator_checkpoint_path": str(tmp_path / files[0]["experiment_id"] / "model000002.pt"),
        "wandb_project": "StableCascade",
        "wandb_entity": "wandb_username",
        "webdataset_path": [f"file:{world}/00.tar", f"{world}/01.tar"],
    }
    for file in files:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(file))
        out = run_script("train_cascade.py", str(tmp_path / "config.yaml")).stdout
        assert "Trained for 2 steps" in out
        found = set(os.listdir(tmp_path / file["experiment_id"]))
        assert {"model000002.pt", "opt000002.pt"} <= found
    assert "Starting from the weights of" in out and "wandb_run_id.txt" in found


def test_nothing_is_said_twice(tmp_path, world):
    """A file's kind may be given by a flag as well, but no other."""
    path = write_file("stage_a", tmp_path, world)
    result = run_script("train_cascade.py", path, "--kind", "semantic", ok=False)
    assert result.returncode == 2 and "--kind is semantic, but" in result.stderr + result.stdout


def test_training_of_text_without_captions_is_refused(tmp_path, frozen):
    files = [(f"{i:02d}.jpg", encoded(random_image(40, 40, i))) for i in range(6)]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").write_bytes(tar_bytes(files))
    with pytest.raises(InputError, match="caption"):
        train_recipe(read("stage_c", tmp_path, str(tmp_path / "shards"), *frozen_of("stage_c", frozen)).recipe(), ALONE)
    run("semantic", tmp_path / "s", str(tmp_path / "shards"), QUIET)


def test_a_missing_open_clip_is_named_with_its_extra(tmp_path, world, frozen, monkeypatch):
    """The documented default encodes the text where neither the network nor the file says anything else."""
    monkeypatch.setitem(sys.modules, "open_clip", None)
    text = [("model", {**UNET, "text": {"enc_attn_dim": 0, "text_length": 77}, "pixel_channels": 0})]
    with pytest.raises(InputError, match=r"requires the package open-clip: pip install 'diff_dalle\[clip\]'"):
        read("stage_b", tmp_path, world, *frozen_of("stage_b", frozen), *text).recipe().open(ALONE)
