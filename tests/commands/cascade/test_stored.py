"""Training stages B and C on what ``prepare_data.py latents`` has stored: equal to making it in every step, without
pixels where nothing needs them; what is refused; and the command itself."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from cascade_file_making import SAMPLES, UNET, frozen_of, make_world, read, run, write_file
from checkpoint_making import make_classifier_file
from marks import slow
from refusing import refused
from script_running import hashes
from script_running import run as run_script
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.commands.prepare import LatentsConfig, latents
from diff_dalle.data import samples
from diff_dalle.data.samples import Samples
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings import computing
from diff_dalle.randomness import Draw

SQUARES, FIXED = ("multi_aspect_ratio", None), ("denoising.semantic_scale", [0.75, 0.75])
QUIET = ("loop.preview_samples", 0)
RATIOS = {"multi_aspect_ratio": ["1/1", "1/2"], "data.bucket_factor": 8, "bucketeer_random_ratio": 0.5}


@pytest.fixture(scope="module")
def common(tmp_path_factory, frozen):
    """Settings of each stage whose text, and image embeddings, a CLIP makes, with much dropped."""
    clip = make_classifier_file(tmp_path_factory.mktemp("clip"), noised=False)
    model = {**UNET, "micro_conditions": [], "text": {"enc_attn_dim": 0, "text_length": 12}, "pooled_width": 16}
    own = {
        "stage_b": [("model", {**model, "pixel_channels": 0}), ("denoising.semantic_dropout", 0.3)],
        "stage_c": [
            ("model", {**model, "text_width": 16, "image_width": 16}),
            ("clip_image_model_name", clip),
            ("denoising.image_dropout", 0.5),
        ],
    }
    shared = [*RATIOS.items(), ("data.bucket_crop", "center"), ("clip_text_model_name", clip), QUIET]
    shared.append(("denoising.text_dropout", 0.5))
    return {kind: [*frozen_of(kind, frozen), *changes, *shared] for kind, changes in own.items()}


def store(kind, folder, world, *changes, **settings) -> str:
    """The folder of what is stored; settings: of the command."""
    path = str(folder / "latents")
    file = write_file(kind, folder / "file", world, *changes, ("latents_path", path))
    latents(LatentsConfig(file, **{"dtype": "float32", **settings}))
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory, world, common):
    """What is stored for stage C."""
    return store("stage_c", tmp_path_factory.mktemp("stored"), world, *common["stage_c"])


def opened(kind, folder, world, *changes):
    return read(kind, folder, world, *changes).recipe().open(ALONE)


def trained(session, steps=4) -> tuple[list[float], torch.Tensor]:
    """The losses of some steps, and the weights after them."""
    data, _ = session.both_loaders
    (trainee,) = session.trainees(data)
    losses, batches = [], data.batches(0)
    for step in range(steps):
        batch = next(batches)
        trainee.update([(batch, Draw(0, batch.index, batch.index.device))], step)
        losses.append(trainee.scalars()["loss"])
    batches.close()
    return losses, torch.cat([each.detach().flatten() for each in trainee.task.model.parameters()])


def without_pixels(monkeypatch) -> None:
    def decoded(*arguments):
        raise AssertionError("an image is decoded")

    monkeypatch.setattr(samples, "decode_image", decoded)


# ----------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("kind", "changes", "dtype", "names", "made", "close"),
    [
        ("stage_c", [], "float32", "semantic, image, text, text_states", "", 1e-5),
        slow("stage_c", [SQUARES], "float16", "semantic, image, text, text_states", "", 2e-3),
        slow("stage_b", [FIXED], "float32", "stage_a, semantic, text", "", 1e-5),
        ("stage_b", [], "float32", "stage_a, text", "semantic", 1e-5),
        ("stage_b", [FIXED, ("train_encoder", True)], "float16", "stage_a, text", "semantic", 2e-3),
    ],
)
def test_training_equals_that_without(
    tmp_path, world, common, monkeypatch, capsys, kind, changes, dtype, names, made, close
):
    changes = [*common[kind], *changes]
    expected, expected_weights = trained(opened(kind, tmp_path, world, *changes))
    folder = store(kind, tmp_path, world, *changes, dtype=dtype)
    assert (f"Not stored, and made in every step: {made}." in capsys.readouterr().out) == bool(made)
    if not made:
        without_pixels(monkeypatch)
    session = opened(kind, tmp_path, world, *changes, ("latents_path", folder))
    rest = f"; made in every step: {made}." if made else "; no image is decoded."
    assert f"Read from {folder}: {names}{rest}" in capsys.readouterr().out
    losses, weights = trained(session)
    assert losses == pytest.approx(expected, rel=close) and len(set(losses)) == 4
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=close)


def test_neither_images_nor_captions_are_read_from_the_shards(tmp_path, world, common, stored):
    data, _ = opened("stage_c", tmp_path, world, *common["stage_c"], ("latents_path", stored)).both_loaders
    raw = data.collection.fetch(0, 0)
    assert raw.members == {} and len(raw.embeddings) == 4
    batch = data.batch_at(range(4))
    assert batch.images.shape == (4, 0, 0, 0) and batch.cond.tokens is None


def test_a_run_that_is_cut_in_two_is_the_same_run(tmp_path, world, common, stored):
    """With previews and an evaluation, whose samples are made as ever."""
    shown = [("loop.preview_samples", 2), ("data.val_path", world), ("loop.eval_interval", 2), ("loop.eval_samples", 8)]
    own = [*common["stage_c"], *shown, ("latents_path", stored), ("loop.keep_checkpoints", 0)]
    run("stage_c", tmp_path / "whole", world, *own)
    for updates in (2, 4):
        run("stage_c", tmp_path / "cut", world, *own, ("updates", updates))
    whole, cut = (hashes(tmp_path / name / "run") for name in ("whole", "cut"))
    last = [name for name in whole if "000004" in name]
    assert last and all(whole[name] == cut[name] for name in last)
    plain = [*common["stage_c"], *shown]
    run("stage_c", tmp_path / "plain", world, *plain)
    found = [held_out(tmp_path / name) for name in ("whole", "plain")]
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-5)
    same = [(tmp_path / name / "out" / "run" / "samples_000004.png").read_bytes() for name in ("whole", "plain")]
    assert same[0] == same[1]


def held_out(folder: Path) -> list[float]:
    lines = (folder / "run" / "progress.jsonl").read_text().splitlines()
    return [row["held_out/loss"] for row in map(json.loads, lines) if "held_out/loss" in row]


def damaged_world(folder: Path) -> str:
    """One with an image and a caption that cannot be read, and a sample without caption."""
    make_world(folder)
    files = []
    for number in range(SAMPLES):
        files.append((f"{number:04d}.jpg", b"none" if number == 3 else encoded(random_image(40, 36, number))))
        if number != 7:
            files.append((f"{number:04d}.txt", b"\xff\xfe\xff" if number == 5 else f"picture {number}".encode()))
    (folder / "00.tar").write_bytes(tar_bytes(files))
    return str(folder)


def test_missing_rows_are_replaced_by_the_same_samples(tmp_path, common, caplog, capsys):
    world = damaged_world(tmp_path / "shards")
    changes = [*common["stage_c"], ("data.max_broken", 0.5)]
    expected, _ = trained(opened("stage_c", tmp_path, world, *changes), 8)
    path = tmp_path / "latents"
    lines = latents(
        LatentsConfig(write_file("stage_c", tmp_path, world, *changes, ("latents_path", str(path))), (), "float32")
    )
    counts = json.loads((path / "semantic" / "embeddings.json").read_text())["counts"]
    assert counts == {"shards": 2, "samples": 24, "embeddings": 21, "missing": 3}
    assert "3 samples without an embedding: 1 without an image or a caption, 2 that cannot be read" in lines
    assert [line.partition(": ")[0].split()[-1] for line in lines[-2:]] == ["0003", "0005"] or lines[-2:]
    session = opened("stage_c", tmp_path, world, *changes, ("latents_path", str(path)))
    with caplog.at_level(logging.WARNING):
        losses, _ = trained(session, 8)
    assert losses == pytest.approx(expected, rel=1e-5)
    data, _ = session.both_loaders
    assert (data.missing, data.broken) == (2, 0)
    assert "00.tar : 0003: its embedding is all zeros, the mark of a missing one" in caplog.text


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_was_stored_of_something_else_is_refused(tmp_path, world, common, stored):
    """By what made it, and of what."""
    run("semantic", tmp_path / "other", world, QUIET, ("updates", 1), ("loop.seed", 7))
    semantic = str(tmp_path / "other" / "run" / "model000001.pt")
    for changes, message in (
        ([("effnet_checkpoint_path", semantic)], rf"identity is .* there and .*{semantic} \(.*\) here"),
        ([("image_size", 40)], "shape is|made_from is images of as many pixels as 32×32, .* and .* as 40×40"),
        ([("loop.seed", 1)], "by the seed 0 there and .* by the seed 1 here"),
        ([SQUARES], "made_from is images .* there and images of 32×32 pixels, cropped in the center here"),
        ([("captions_getter", ["json", "captions"])], r"made_from is captions \(txt\) there"),
    ):
        with refused(rf"latents_path: {stored}/\w+ holds others than those of this run \(.*{message}"):
            opened("stage_c", tmp_path, world, *common["stage_c"], *changes, ("latents_path", stored))


def test_what_is_not_complete_is_refused(tmp_path, world, common, stored):
    def opening(folder, world=world):
        return opened("stage_c", tmp_path, world, *common["stage_c"], ("latents_path", str(folder)))

    with refused("latents_path: .* has nothing of semantic, image, text, text_states: run diff-dalle .*latents first"):
        opening(tmp_path / "nothing")
    copy = Path(shutil.copytree(stored, tmp_path / "copy"))
    record = copy / "semantic" / "embeddings.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "counts": {}}))
    with refused("latents_path: .*/copy/semantic is not finished: run diff-dalle .*latents again, or remove it"):
        opening(copy)
    shutil.rmtree(copy / "semantic")
    shutil.rmtree(copy / "text_emb")
    with refused("latents_path: .*/copy has text without text: run"):
        opening(copy)
    more = make_world(tmp_path / "more", shards=3)
    with refused(r"latents_path: .*/semantic was not made of 1 shard of this run, the first .*02\.tar"):
        assert opening(stored, more).both_loaders


def test_a_sample_in_another_bucket_than_stored_ends_the_run(tmp_path, world, common, stored):
    """The random ratios follow from a sample's number among all: of a part of the shards they are others."""
    session = opened("stage_c", tmp_path, f"{world}/01.tar", *common["stage_c"], ("latents_path", stored))
    with refused(r"a sample has latents of \d×\d positions, but its image of \d+×\d+ pixels would have \d×\d"):
        trained(session, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("data.bucket_crop", "random")], r"data\.bucket_crop is random, .* latents_path .*: set it to center"),
        ([SQUARES, ("data.random_crop", True)], r"data\.random_crop is set, but the latents of latents_path"),
        ([SQUARES, ("data.random_flip", True)], r"data\.random_flip is set, but the latents of latents_path"),
        ([SQUARES, ("data.saliency", "opencv")], r"data\.saliency is set, but the latents of latents_path"),
    ],
)
def test_pixels_that_change_from_epoch_to_epoch_are_refused_when_the_file_is_read(
    tmp_path, world, common, changes, message
):
    with refused(message):
        read("stage_c", tmp_path, world, *common["stage_c"], ("latents_path", "x"), *changes)


def test_adapters_read_what_their_bases_do_but_for_what_they_need(tmp_path, world, common, stored):
    """Tokens that are trained change how captions are encoded, and controls are made of pixels."""
    run("stage_c", tmp_path, world, *common["stage_c"], ("updates", 1))
    base = ("generator_checkpoint_path", str(tmp_path / "run" / "model000001.pt"))
    own = [*common["stage_c"], base, ("latents_path", stored)]
    lora = [*own, ("kind", "stage_c_lora"), ("train_tokens", [["^picture", None]])]
    spec = opened("stage_c", tmp_path, world, *lora).spec
    assert not spec.image.read and spec.read_captions and len(spec.embeddings) == 2
    with refused("prior_data_dir and latents_path exclude each other"):
        read("stage_c", tmp_path, world, *lora, SQUARES, ("prior_data_dir", world))
    control = [*own, ("kind", "stage_c_controlnet"), ("controlnet_filter", "canny"), ("controlnet_blocks", [0])]
    session = opened("stage_c", tmp_path, world, *control, ("controlnet_bottleneck_mode", "semantic"))
    assert session.spec.image.read and not session.spec.read_captions
    assert len(trained(session, 1)[0]) == 1


# ---------------------------------------------------------------------------------------------------------- the command


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_goes_on_where_it_was_ended(tmp_path, world, common, stored, monkeypatch, capsys):
    write, calls = computing.np.lib.format.write_array, []

    def interrupted(file, *arguments, **options):
        write(file, *arguments, **options)
        calls.append(file)
        if len(calls) == 6:  # of two shards of four kinds
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(computing.np.lib.format, "write_array", interrupted)
        store("stage_c", tmp_path, world, *common["stage_c"])
    assert "Disk: about 0.0 MB in " in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.npy"))) == 5
    read_whole, decoded = Samples.unaugmented, []
    count = monkeypatch.setattr
    count(Samples, "unaugmented", lambda self, *given: decoded.append(given[:2]) or read_whole(self, *given))
    assert files(Path(store("stage_c", tmp_path, world, *common["stage_c"]))) == files(Path(stored))
    assert len(decoded) == 2 + SAMPLES  # of the finished shard, the first and the last sample


@pytest.mark.slow
def test_processes_share_the_shards(tmp_path, world, common, stored):
    path = str(tmp_path / "latents")
    file = write_file("stage_c", tmp_path, world, *common["stage_c"], ("latents_path", path))
    out = run_script("prepare_data.py", "latents", "--run", file, "--dtype", "float32", ranks=2).stdout
    assert f"{path}/semantic: 24 embeddings [258] in float32, 2 shards, by semantic encoder" in out
    assert files(tmp_path / "latents") == files(Path(stored))


def test_some_kinds_may_be_left_out(tmp_path, world, common, capsys):
    changes = [*common["stage_c"], SQUARES]
    path = store("stage_c", tmp_path, world, *changes, what=("text", "text_states"))
    assert "Not stored, and made in every step: semantic, image." in capsys.readouterr().out
    assert {each.name for each in Path(path).iterdir()} == {"text_emb", "text_states"}
    session = opened("stage_c", tmp_path, world, *changes, ("latents_path", path))
    assert "text, text_states; made in every step: semantic, image." in capsys.readouterr().out
    plain = opened("stage_c", tmp_path, world, *changes)
    assert trained(session, 2)[0] == pytest.approx(trained(plain, 2)[0], rel=1e-5)


def test_what_cannot_be_stored_is_refused(tmp_path, world, common):
    path = ("latents_path", str(tmp_path / "latents"))

    def given(name, *changes):
        return write_file("stage_c", tmp_path / name, world, *common["stage_c"], *changes)

    for file, what, message in (
        ("", (), "run is not set: name the file of a run"),
        (given("a"), (), "latents_path is not set: name the folder"),
        (
            given("b", path),
            ("stage_a",),
            "what has stage_a, but of this run only semantic, image, text, text_states",
        ),
        (write_file("semantic", tmp_path, world), (), "run is of the kind semantic, but must be of a stage B or C"),
    ):
        with refused(message):
            latents(LatentsConfig(file, what))


def test_text_of_several_captions_is_not_stored(tmp_path, common):
    """Each epoch draws one of them."""
    texts = [(f"{i}.json", json.dumps({"captions": [f"a {i}", f"b {i}"]}).encode()) for i in range(4)]
    pictures = [(f"{i}.jpg", encoded(random_image(40, 36, i))) for i in range(4)]
    (tmp_path / "0.tar").write_bytes(tar_bytes([*pictures, *texts]))
    changes = [*common["stage_c"], ("captions_getter", ["json", "captions"])]
    with refused(r"0\.tar : \d has several captions, of which each epoch draws one: leave the text out, by what"):
        store("stage_c", tmp_path / "all", str(tmp_path), *changes)
    path = store("stage_c", tmp_path, str(tmp_path), *changes, what=("semantic", "image"))
    session = opened("stage_c", tmp_path, str(tmp_path), *changes, ("latents_path", path))
    plain = opened("stage_c", tmp_path, str(tmp_path), *changes)
    assert trained(session)[0] == pytest.approx(trained(plain)[0], rel=1e-5)
