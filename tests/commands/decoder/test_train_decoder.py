"""Training a decoder from its file: data, embeddings, U-Nets that are trained or kept, resuming."""

import gzip
import hashlib
import logging
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_making import make_classifier_file
from decoder_file_making import SAMPLES, SHARDS, UNET, WIDTH, embedding, make_world, opened, read_run_file, write_file
from open_clip_making import make_open_clip
from script_running import run as run_script
from shard_making import npy_bytes, tar_bytes

from diff_dalle.checkpoints.checkpoint import ROLES, load_file, networks_in
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.checkpoints.loading import open_networks
from diff_dalle.commands.decoder_report import describe_decoder
from diff_dalle.config import InputError
from diff_dalle.diffusion.augmentation import area_resize
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.embeddings.computing import EmbeddingsConfig, compute_embeddings
from diff_dalle.recipes.decoder import open_decoder
from diff_dalle.recipes.decoders.evaluating import DecoderSampler
from diff_dalle.recipes.train import train_recipe
from diff_dalle.tasks.decoding import DecodingTask
from diff_dalle.training.loop import evaluating

QUIET = ("train.n_sample_images", 0)
EPOCH = ("--set", "train.epochs=1")
TWO_UNETS = [("decoder.unets", [UNET, UNET]), ("decoder.image_sizes", [8, 16])]
TEXT_UNET = {**UNET, "cond_on_text_encodings": True, "text_embed_dim": 16, "image_embed_dim": 16, "max_text_len": 12}


@pytest.fixture(scope="module")
def bare_world(tmp_path_factory):
    """Without embeddings."""
    return make_world(tmp_path_factory.mktemp("bare"), member="")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return {"make": "diff_dalle", "model": make_classifier_file(tmp_path_factory.mktemp("clip"), noised=False)}


def sidecars(folder: Path, rows: int = 100, width: int = WIDTH) -> str:
    """Row = the last two characters of the key."""
    folder.mkdir()
    for shard in range(SHARDS):
        values = np.stack(
            [embedding(shard * SAMPLES + row) if row < SAMPLES else np.ones(WIDTH) for row in range(rows)]
        )
        np.save(folder / f"img_emb_{shard:04d}.npy", values[:, :width].astype(np.float32))
    return str(folder)


def work(path: str, *flags: str) -> None:
    """Train as the file says."""
    train_recipe(read_run_file(path, *flags).recipe(), ALONE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, world):
    """The folder of a run of five steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        work(write_file(folder, world=world))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("unet*.pt"))}


def test_epochs_and_intervals_are_counted_in_samples(tmp_path, world):
    recipe = read_run_file(write_file(tmp_path, world=world)).recipe()
    assert recipe.training.samples == 2 and open_decoder(recipe, ALONE).recipe.training.samples == 20
    found = opened(write_file(tmp_path, ("train.epoch_samples", 7), ("train.epochs", 3), world=world)).recipe
    assert (found.training.samples, found.epoch_samples, found.training.eval_interval) == (21, 7, 2)
    once = opened(write_file(tmp_path, ("train.epoch_samples", 5), ("train.epochs", 1), world=world)).recipe.training
    assert once.eval_interval == once.last_step(1) == 2  # one epoch, one validation
    assert found.training.save_interval == 2 and found.sample_interval == 2 and found.training.eval_samples == SAMPLES
    own = ("train.validation_samples", 3), QUIET
    found = opened(write_file(tmp_path, *own, world=world)).recipe
    assert found.training.eval_samples == 3 and found.sample_interval == 0


def test_every_training_sample_comes_once_an_epoch(tmp_path, world):
    found = opened(write_file(tmp_path, world=world))
    assert found.train.samples == 2 * SAMPLES and found.val.samples == found.test.samples == SAMPLES
    seen = {found.train.describe(position) for position in range(found.train.samples)}
    held = {found.val.describe(position) for position in range(SAMPLES)}
    assert len(seen) == 2 * SAMPLES and not held & seen


def test_training_is_shuffled_and_validation_is_not(tmp_path, world):
    def order(loader) -> list[str]:
        return [loader.describe(position) for position in range(loader.samples)]

    found = opened(write_file(tmp_path, world=world))
    assert order(found.train) != sorted(order(found.train)) and order(found.val)[::8] == sorted(order(found.val))[::8]
    plain = opened(write_file(tmp_path, ("data.shuffle_train", False), ("data.streams", 1), world=world))
    assert order(plain.train) == sorted(order(plain.train))
    mixed = opened(write_file(tmp_path, ("data.shuffle_val_test", True), world=world))
    assert sorted(order(mixed.val)) == sorted(order(found.val)) and order(mixed.val) != order(found.val)
    changes = [("data.shuffle_train", False), ("data.resample_train", True), ("seed", 3)]
    drawn = opened(write_file(tmp_path, *changes, world=world))
    epochs = [drawn.train.describe(position) for position in range(8 * drawn.train.samples)]
    assert len({tuple(sorted(epochs[i : i + 10])) for i in range(0, 80, 10)}) > 1 and not drawn.val.order.resample


# ------------------------------------------------------------------------------------------------------- embeddings


def embeddings_of(opened, count: int = 6) -> dict[str, np.ndarray]:
    batch = opened.train.batch_at(range(count))
    names = [opened.train.describe(position) for position in range(count)]
    return {name: row.numpy() for name, row in zip(names, batch.cond.image_embedding, strict=True)}


def number_of(name: str) -> int:
    key = name.rpartition(" ")[2]
    return int(key[:2]) * SAMPLES + int(key[2:])


def test_embeddings_of_members_and_of_files_are_those_of_the_sample(tmp_path, world, bare_world):
    url = sidecars(tmp_path / "emb")
    for source, changes in ((world, []), (bare_world, [("data.img_embeddings_url", url)])):
        found = opened(write_file(tmp_path, *changes, world=source))
        for name, row in embeddings_of(found).items():
            np.testing.assert_array_equal(row, embedding(number_of(name)))
        assert found.materials.origins["image embeddings"].startswith(url if changes else "the .img_emb.npy members")


def test_a_clip_sees_the_crop_that_is_trained_on(tmp_path, bare_world, clip):
    unet = {**UNET, "image_embed_dim": 16}
    path = write_file(tmp_path, ("decoder.clip", clip), ("decoder.unets", [unet]), world=bare_world)
    run = opened(path)
    assert run.materials.spec.image.size == (16, 16)  # what the CLIP sees is larger than what is trained
    assert run.run.decoder.clip.identity == run.materials.clip.identity != ""
    batch = run.train.batch_at(range(2))
    (trainee,) = run.session.trainees(run.val)
    cond, _ = trainee.task.given_conditions(batch, None)
    torch.testing.assert_close(cond.image_embedding, run.materials.clip.encode_images(batch.images))
    work(path, *EPOCH)


def test_the_clip_of_computed_embeddings_is_recorded_and_not_opened(tmp_path, bare_world, clip):
    """So that a decoder knows the CLIP that it can be given pictures by."""
    folder = os.path.dirname(bare_world)
    compute_embeddings(EmbeddingsConfig((folder,), clip_path=clip["model"], out_dir=str(tmp_path / "emb")), ALONE)
    unet = {**UNET, "image_embed_dim": 16}
    changes = [("decoder.unets", [unet]), ("data.img_embeddings_url", str(tmp_path / "emb"))]
    path = write_file(tmp_path, *changes, ("data.index_width", None), world=bare_world)
    run = opened(path)
    identity = load_clip("diff_dalle", clip["model"], "cpu").identity
    assert run.run.decoder.clip == ClipConfig("diff_dalle", clip["model"], identity)
    assert run.materials.clip is None
    for epochs in (1, 2):  # resumes
        work(path, "--set", f"train.epochs={epochs}", "--set", "tracker.log.0.auto_resume=True")
    (saved,) = open_networks(str(next((tmp_path / "run").glob("unet0_ema*5.pt"))), ("decoder",))
    assert saved.settings.decoder.clip == run.run.decoder.clip
    again = open_decoder(run.run.recipe(), ALONE)  # what a checkpoint records is a run too
    assert again.run.decoder.clip == run.run.decoder.clip and again.materials.clip is None
    bad = [*changes, ("decoder.clip", {**clip, "identity": "another"})]
    with pytest.raises(InputError, match="data.img_embeddings_url: .* but the CLIP here is another"):
        opened(write_file(tmp_path, *bad, ("data.index_width", None), world=bare_world))


def test_images_smaller_than_a_clip_sees_are_refused_when_it_is_opened(tmp_path, bare_world, monkeypatch):
    """Where the file alone does not tell."""
    monkeypatch.setitem(sys.modules, "open_clip", make_open_clip())
    clip = ("decoder.clip", {"make": "open_clip", "model": "ViT-B-32/laion2b_s34b_b79k"})
    changes = [clip, ("decoder.image_sizes", [4]), ("data.preprocessing", {"CenterCrop": {"size": 6}})]
    with pytest.raises(InputError, match="sees images of 8 pixels, but data.preprocessing makes 6"):
        opened(write_file(tmp_path, *changes, world=bare_world))
    changes[2] = ("data.preprocessing", {"CenterCrop": {"size": 8}})
    assert opened(write_file(tmp_path, *changes, world=bare_world)).materials.clip.image_size == 8


def test_a_clip_encodes_the_captions(tmp_path, world, bare_world, clip):
    for source, embed in ((bare_world, {}), (world, {"image_embed_dim": WIDTH})):
        unet = {**TEXT_UNET, **embed}
        changes = [("decoder.clip", clip), ("decoder.unets", [unet])]
        if embed:
            folder = tmp_path / "emb"
            changes.append(("data.img_embeddings_url", sidecars(folder)))
        run = opened(write_file(tmp_path, *changes, world=source))
        cond = run.train.batch_at(range(2)).cond
        assert cond.tokens.shape == (2, 12) and (cond.image_embedding is None) == (not embed)
        (trainee,) = run.session.trainees(run.val)
        given, _ = trainee.task.given_conditions(run.train.batch_at(range(2)), None)
        assert given.text_states.shape == (2, 12, 16) and given.image_embedding is not None


def test_text_encodings_of_files(tmp_path, world):
    folder = tmp_path / "text"
    folder.mkdir()
    for shard in range(SHARDS):
        values = np.random.default_rng(shard).standard_normal((100, 3, 16)).astype(np.float32)
        np.save(folder / f"text_states_{shard:02d}.npy", values)
    unet = {**TEXT_UNET, "image_embed_dim": WIDTH}
    changes = [("data.text_embeddings_url", str(folder)), ("decoder.unets", [unet])]
    cond = opened(write_file(tmp_path, *changes, world=world)).train.batch_at([0]).cond
    assert cond.text_states.shape == (1, 12, 16) and cond.mask.sum() == 3 and cond.image_embedding is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "conditioned on image embeddings, but there are none: set data.img_embeddings_url"),
        (
            [("decoder.unets", [{**TEXT_UNET, "cond_on_image_embeds": False}])],
            "conditioned on text encodings, but there are none: set data.text_embeddings_url",
        ),
        ([("decoder.clip", "CLIP")], r"makes embeddings of 16 elements, but image_embed_dim is 6"),
        (
            [("decoder.clip", "CLIP"), ("decoder.unets", [{**TEXT_UNET, "text_embed_dim": 5}])],
            "makes embeddings of 16 elements, but text_embed_dim is 5",
        ),
        ([("data.img_embeddings_url", "nowhere")], "nowhere"),
        ([("data.webdataset_base_url", "nowhere/{}.tar")], "there is no folder nowhere"),
        ([("data.splits", {"train": 0.9, "val": 0.05, "test": 0.05}), ("data.end_shard", 1)], "only 2 shards"),
    ],
)
def test_what_is_missing_is_said_before_training(tmp_path, bare_world, clip, changes, message):
    changes = [(path, clip if value == "CLIP" else value) for path, value in changes]
    with pytest.raises(InputError, match=message):
        opened(write_file(tmp_path, *changes, world=bare_world))


def test_embeddings_of_another_width_or_number_are_refused(tmp_path, bare_world):
    url = sidecars(tmp_path / "narrow", width=4)
    with pytest.raises(InputError, match=r"must hold floating-point embeddings \[rows, 6\]|holds .*4"):
        opened(write_file(tmp_path, ("data.img_embeddings_url", url), world=bare_world))
    url = sidecars(tmp_path / "short", rows=2)
    changes = [("data.img_embeddings_url", url), ("data.index_width", 0)]
    with pytest.raises(InputError, match="has 2 embeddings, but .* has 5 samples"):
        opened(write_file(tmp_path, *changes, world=bare_world))


def test_the_width_of_indices_is_that_of_the_folder_or_four(tmp_path, bare_world):
    url = sidecars(tmp_path / "emb", rows=10**2 * SHARDS)  # with four digits the shard's number is part of the row
    for given, expected in ((2, 2), (None, 4)):
        changes = [("data.img_embeddings_url", url), ("data.index_width", given)]
        materials = opened(write_file(tmp_path, *changes, world=bare_world)).materials
        assert materials.spec.embeddings[0].source.index_width == expected


# ------------------------------------------------------------------------------------------------------------ U-Nets


def test_each_unet_has_its_own_optimizer(tmp_path, world):
    run = opened(write_file(tmp_path, *TWO_UNETS, ("train.lr", [1e-3, 2e-3]), ("train.use_ema", False), world=world))
    trainees = run.session.trainees(run.val)
    assert [trainee.name for trainee in trainees] == ["unet0", "unet1"] and not trainees[0].emas
    rates = [trainee.optimizations[""].config.lr for trainee in trainees]
    assert rates == [1e-3, 2e-3]


def test_unets_trained_one_after_the_other_make_a_decoder(tmp_path, world, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    masks = {first: [True, False], second: [False, True]}
    for folder, mask in masks.items():
        folder.mkdir()
        changes = [*TWO_UNETS, QUIET, ("train.unet_training_mask", mask), ("tracker.save.save_type", "model")]
        if folder == second:
            changes.append(("train.init_checkpoint", str(first / "latest.pth")))
        monkeypatch.chdir(folder)
        work(write_file(folder, *changes, world=world), *EPOCH)
    content = load_file(str(second / "latest.pth"), values=True)
    both, alone = networks_in(content, ["unet0", "unet1"]), load_file(str(first / "latest.pth"), values=True)
    assert content["trainee"] == "" and set(both) == {"unet0", "unet1"} and alone["trainee"] == "unet0"
    assert all(torch.equal(value, alone["state"][name]) for name, value in both["unet0"]["state"].items())
    assert len(open_networks(str(second / "latest.pth"), ("decoder",))) == 2
    changes = [*TWO_UNETS, ("train.init_checkpoint", str(second / "latest.pth"))]
    run = opened(write_file(tmp_path, *changes, world=world))
    assert run.recipe.training.init_checkpoint == (str(second / "latest.pth"),) and not run.frozen


def test_weights_that_are_not_of_the_decoder_are_refused(tmp_path, world):
    (tmp_path / "one").mkdir()
    changes = [*TWO_UNETS, ("train.unet_training_mask", [False, True]), ("tracker.save.save_type", "model")]
    work(write_file(tmp_path / "one", *changes, world=world), *EPOCH)
    names = {path.name for path in (tmp_path / "one" / "run").glob("*.pt")}
    assert "unet1_model000003.pt" in names and not any(name.startswith("unet0") for name in names)
    given = ("train.init_checkpoint", "latest.pth")
    with pytest.raises(InputError, match="holds unet1, but the decoder has unet0: leave it out"):
        opened(write_file(tmp_path, given, world=world))
    other = [("decoder.unets", [UNET, {**UNET, "dim": 16}]), ("decoder.image_sizes", [8, 16])]
    with pytest.raises(InputError, match=r"holds a unet1 with other settings than decoder.unets\[1\]"):
        opened(write_file(tmp_path, given, *other, ("train.unet_training_mask", [True, False]), world=world))


# ----------------------------------------------------------------------------------------------------------- metrics


def of_clip(clip, count: int = 5) -> list[tuple[str, object]]:
    metrics = {"n_evaluation_samples": count, "FID": {"feature": "clip"}}
    return [("decoder.clip", clip), ("decoder.unets", [{**UNET, "image_embed_dim": 16}]), ("evaluate", metrics)]


def test_metrics_are_of_the_first_held_out_samples_whatever_the_chunks(tmp_path, bare_world, clip):
    values = []
    for size in (1, 3):
        run = opened(write_file(tmp_path, *of_clip(clip, 3), ("train.max_batch_size", size), world=bare_world))
        trainees = run.session.trainees(run.val)
        with evaluating(trainees):
            (value,) = run.session.measure(trainees)().values()
        values.append(value)
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_too_few_held_out_samples_for_a_metric_are_said_before_training(tmp_path, bare_world, clip):
    metrics = {"n_evaluation_samples": 100, "KID": {"feature": "clip", "subset_size": 20}}
    run = opened(write_file(tmp_path, *of_clip(clip), ("evaluate", metrics), world=bare_world))
    with pytest.raises(
        InputError, match="KID.subset_size is 20, which needs at least 20 images, but the split val has 5"
    ):
        run.session.measure(run.session.trainees(run.val))


class Recorded(torch.nn.Module):
    """Stands for a U-Net: returns zeros and keeps its conditions."""

    def __init__(self):
        super().__init__()
        self.weight, self.given = torch.nn.Parameter(torch.zeros(1)), []

    def encode_text(self, cond):
        return cond

    def forward(self, x, t, cond):
        self.given.append(cond)
        return torch.cat([x, x], 1) * 0 + self.weight


@pytest.mark.parametrize(("kept", "expected"), [((0, 1, 2), (0, 1, 2)), ((1, 2), (1, 2)), ((0, 2), (2,))])
def test_a_cascade_begins_above_a_gap_with_the_originals(tmp_path, world, kept, expected):
    changes = [("decoder.unets", [UNET] * 3), ("decoder.image_sizes", [8, 16, 32]), ("decoder.sample_timesteps", 2)]
    run = opened(write_file(tmp_path, *changes, world=world))
    tasks = {i: DecodingTask(Recorded(), run.run.decoder.stage(i)) for i in kept}
    sampler = DecoderSampler(tasks, 2, [1.0] * 3)
    batch = run.val.batch_at(range(2))
    originals, made = sampler(batch)
    assert tuple(sampler.tasks) == expected and made.shape == originals.shape == (2, 3, 32, 32)
    torch.testing.assert_close(originals, batch.images)
    low = tasks[2].model.given[0].low_res
    if expected[0] == 2:
        torch.testing.assert_close(low, area_resize(batch.images, (16, 16)))
    else:
        assert low.shape[2] == 16 and not torch.allclose(low, area_resize(batch.images, (16, 16)), atol=0.1)


# ----------------------------------------------------------------------------------------------------------- folders


def test_a_folder_with_a_run_is_continued_replaced_or_refused_as_the_file_says(tmp_path, world):
    path = write_file(tmp_path, world=world)
    work(path, *EPOCH)
    before = digests(tmp_path / "run")
    with pytest.raises(InputError, match="holds a run after 3 steps: set tracker.log.auto_resume to continue it"):
        work(path)
    assert digests(tmp_path / "run") == before
    work(path, "--set", "tracker.log.auto_resume=True")
    kept = {name: each for name, each in before.items() if name.endswith("000003.pt")}
    assert digests(tmp_path / "run").items() >= kept.items() and len(kept) == 3
    work(path, "--set", "tracker.overwrite_data_path=True", *EPOCH)
    again = {name: each for name, each in digests(tmp_path / "run").items() if "best" not in name}
    assert {name[-9:] for name in again} == {"000002.pt", "000003.pt"} and again.items() <= before.items()


def test_a_saved_checkpoint_restores_the_run_elsewhere(tmp_path, world, trained):
    work(write_file(tmp_path, world=world), *EPOCH)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "latest.pth").rename(tmp_path / "moved.pth")
    load = ("tracker.load", {"load_from": "local", "file_path": str(tmp_path / "moved.pth")})
    work(write_file(elsewhere, load, world=world))
    names = [name for name in digests(elsewhere / "run") if name.endswith("000005.pt")]
    for name in names:
        one, other = (
            load_file(str(folder / "run" / name), roles=tuple(ROLES), values=True) for folder in (elsewhere, trained)
        )
        torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    assert len(names) == 3


def test_the_configuration_is_saved_beside(tmp_path, world):
    path = write_file(tmp_path, ("tracker.save.save_meta_to", str(tmp_path / "meta")), world=world)
    work(path, *EPOCH)
    saved = tmp_path / "meta" / "decoder_config.json"
    assert read_run_file(str(saved)) == read_run_file(path, *EPOCH, "--set", "data.streams=8")


# ------------------------------------------------------------------------------------------------------------ report


def test_check_counts_data_and_costs(tmp_path, world):
    path = write_file(tmp_path, *TWO_UNETS, ("train.unet_training_mask", [True, False]), world=world)
    text = describe_decoder(read_run_file(path), ALONE)
    assert "| train | 2 | 10 | 0 | training |" in text and "| val | 1 | 5 | 0 |" in text
    assert "2 epochs of 10 samples: 5 steps of 4 samples" in text
    assert "image embeddings: the .img_emb.npy members of the shards" in text
    assert "image [3, 8, 8], image_embedding [6]" in text
    assert text.count("| trained |") == 1 and "| unet1 | 16 |" in text and "kept as it is" in text
    assert not (tmp_path / "run").exists()


def test_check_finds_missing_embeddings_and_training_skips_them(tmp_path, caplog, monkeypatch):
    """Of gzipped shards: the mark of a missing embedding is a row of zeros."""
    monkeypatch.chdir(tmp_path)  # savers keep their files there
    template = make_world(tmp_path / "marked", form="{:02d}.tar.gz")
    for path in sorted((tmp_path / "marked").iterdir()):
        with tarfile.open(path) as tar:
            files = [(each.name, tar.extractfile(each).read()) for each in tar]
        marked = {f"{path.name[:2]}{row:02d}.img_emb.npy" for row in (0, 3)}
        files = [(name, npy_bytes(np.zeros(WIDTH)) if name in marked else data) for name, data in files]
        path.write_bytes(gzip.compress(tar_bytes(files)))
    own = [("data.max_broken", 0.0), ("data.shard_cache", str(tmp_path / "cache")), QUIET]
    path = write_file(tmp_path, *own, world=template)
    text = describe_decoder(read_run_file(path), ALONE)
    assert "Split train: 4 of 10 samples: without an embedding, and skipped: its embedding is all zeros" in text
    assert "Split val: 2 of 5 samples" in text and "Split test: 2 of 5 samples" in text
    work(path, *EPOCH)
    assert "4 of 10 samples: without an embedding" in caplog.text and "shards gzipped" in caplog.text
    assert (tmp_path / "latest.pth").exists()


def test_a_missing_wandb_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = {"log_type": "wandb", "wandb_project": "p", "wandb_entity": "e"}
    path = write_file(tmp_path, ("tracker.log", log), world="nowhere/{}.tar")
    for flags in ([], ["--check", "True"], ["--dry_run"]):
        result = run_script("train_decoder.py", "--config_file", path, *flags, ok=False)
        assert result.returncode == 2 and "or remove wandb from tracker.log" in result.stderr, flags


def test_missing_shards_are_named(tmp_path, caplog):
    template = make_world(tmp_path / "gap")
    (tmp_path / "gap" / "02.tar").unlink()
    with caplog.at_level(logging.WARNING):
        opened(write_file(tmp_path, world=template))
    assert "1 shard is missing: 02" in caplog.text


def test_the_script_checks_trains_and_resumes_in_one_and_two_processes(tmp_path, world):
    changes = [("tracker.log", {"log_type": "console", "auto_resume": True}), ("train.accept_changed_batch", True)]
    path = write_file(tmp_path, *changes, world=world)

    def script(*flags, path=path, **options):
        return run_script("train_decoder.py", f"--config_file {path} --threads 1", *flags, **options)

    assert "| train | 2 | 10 |" in script("--check", "True").stdout
    shown = script("--dry_run").stdout
    assert shown.startswith("kind: decoder\ndecoder:\n") and "webdataset_base_url" in shown
    assert "Trained for 3 steps" in script(*EPOCH).stdout
    resumed = script("--set", "data.batch_size=2", ranks=2).stdout
    assert "Resuming at step 3" in resumed and "Trained for 5 steps" in resumed
    sets = ("data.splits.val=0.5", "data.splits.train=0.25", "train.epochs=3")
    said = script(*(part for each in sets for part in ("--set", each)), ok=False).stderr
    assert "choose another tracker.data_path" in said and "--" not in said
    result = script(path=write_file(tmp_path, ("train.lrr", 3), world=world), ok=False)
    assert result.returncode == 2 and "is an unknown setting; did you mean lr?" in result.stderr
    assert "train.lrr (" in result.stderr
