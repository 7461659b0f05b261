"""Grids and metrics of a decoder in training: guidance scales compared, networks of metrics that are missing."""

import json
from pathlib import Path

import eval_making
import numpy as np
import pytest
import torch
from checkpoint_making import make_classifier_file
from decoder_file_making import UNET, make_world, opened, read_run_file, write_file
from PIL import Image

from diff_dalle.commands.decoder_report import describe_decoder
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.embeddings.computing import EmbeddingsConfig, compute_embeddings
from diff_dalle.evaluation.pretrained import URL, URLS
from diff_dalle.recipes.decoders.evaluating import compared
from diff_dalle.recipes.train import train_recipe
from diff_dalle.training.loop import evaluating

PUBLISHED = Path(__file__).parents[2] / "record" / "given" / "documented"
EVERY = {**eval_making.EVERY, "KID": {**eval_making.EVERY["KID"], "subset_size": 4}, "n_evaluation_samples": 5}
EVERY["precision_recall"] = {**EVERY["precision_recall"], "k": 2}
EVERY["density_coverage"] = {**EVERY["density_coverage"], "k": 2}
EVERY["IS"] = {**EVERY["IS"], "splits": 1}


def randomized(run):
    """Its trainees with weights that do not predict 0."""
    trainees = run.session.trainees(run.val)
    torch.manual_seed(0)
    for trainee in trainees:
        for parameter in trainee.task.model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        trainee.emas.clear()
    return trainees


def test_scales_are_compared_column_by_column():
    assert compared([(3.0,), (1.0,)]) == {"": (3.0, 1.0)}
    assert compared([(1.0, 3.0), (2.0,)]) == {" (cond_scale 1)": (1.0, 2.0), " (cond_scale 3)": (3.0, 2.0)}
    both = compared([(1.0, 3.0), (2.0, 1.5)])
    assert both == {" (cond_scale 1, 2)": (1.0, 2.0), " (cond_scale 3, 1.5)": (3.0, 1.5)}


def test_scales_differ_in_grids_and_metrics_and_are_as_if_alone(tmp_path, world):
    """A list of scales gives a column and values for each, the same as a run with that scale only."""
    grids, values = {}, {}
    for scales in (1, 3, [1, 3]):
        run = opened(write_file(tmp_path, ("train.cond_scale", scales), ("evaluate", EVERY), world=world))
        trainees = randomized(run)
        with evaluating(trainees):
            grids[str(scales)] = trainees[0].task.previews()["samples"]
            values[str(scales)] = run.session.measure(trainees)()
    alone, both = [grids["1"], grids["3"]], grids["[1, 3]"]
    step = 96 + 4  # of a cell and its margin
    assert alone[0].shape[1] == 4 * step + 4 and both.shape[1] == 6 * step + 4  # two samples in a row
    for column, grid in enumerate(alone):
        cell = grid[4:100, 4:100]
        np.testing.assert_array_equal(both[4:100, 4 + column * step : 100 + column * step], cell)
    assert np.abs(alone[0][4:100, 4:100].astype(int) - alone[1][4:100, 4:100]).mean() > 1
    np.testing.assert_array_equal(both[4:100, 2 * step + 4 : 3 * step], alone[0][4:100, step + 4 : 2 * step])
    below = [both[100:, 4 + column * step : 100 + column * step] for column in range(3)]  # "scale 1", …
    assert all((text < 255).any() for text in below)
    assert not np.array_equal(below[0], below[1]) and not np.array_equal(below[1], below[2])
    names = [*values["1"]]
    assert [*values["[1, 3]"]] == [f"{name} (cond_scale {scale})" for scale in (1, 3) for name in names]
    for name in names:
        for scale in (1, 3):
            assert values["[1, 3]"][f"{name} (cond_scale {scale})"] == pytest.approx(values[str(scale)][name], rel=1e-5)
    moved = [name for name in names if values["1"][name] != pytest.approx(values["3"][name], rel=1e-3)]
    assert {name.split()[0] for name in moved} >= {"FID", "KID_mean"}


def test_no_more_images_are_measured_than_there_are(tmp_path, world, capsys):
    found = []
    for count in (5, 50):
        metrics = {**EVERY, "n_evaluation_samples": count, "KID": {**EVERY["KID"], "subset_size": 5}}
        run = opened(write_file(tmp_path, ("evaluate", metrics), world=world))
        trainees = randomized(run)
        with evaluating(trainees):
            measure = run.session.measure(trainees)
            found.append((measure.count, measure()))
        assert "every subset is the whole of 5 images" in capsys.readouterr().out
    assert found[0] == found[1] and found[0][0] == 5


def test_compared_scales_reach_the_folder_and_the_trackers(tmp_path, world):
    changes = [("train.cond_scale", [1, 3]), ("evaluate", EVERY), ("train.epochs", 1)]
    log = ("tracker.log", [{"log_type": "console"}, {"log_type": "tensorboard"}])
    train_recipe(read_run_file(write_file(tmp_path, *changes, log, world=world)).recipe(), ALONE)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tmp_path / "run").rglob("events.out.tfevents*")).parent)).Reload()
    (tag,) = events.Tags()["images"]
    png = sorted((tmp_path / "run" / "samples").glob("*.png"))[-1]
    width, height = Image.open(png).size
    shown = events.Images(tag)[-1]
    assert (shown.width, shown.height) == (width, height) == (604, height)
    rows = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert (
        {name for name in names if name.startswith("FID")}
        == {f"FID ({eval_making.QUARTERS}) (cond_scale {scale})" for scale in (1, 3)}
        <= {tag for tag in events.Tags()["scalars"]}
    )


def test_the_originals_are_not_shown_twice_beside_the_first_unet(tmp_path, world):
    unets = [("decoder.unets", [UNET, UNET]), ("decoder.image_sizes", [8, 16]), ("train.n_sample_images", 1)]
    run = opened(write_file(tmp_path, *unets, world=world))
    first, second = (trainee.task.eval() for trainee in run.session.trainees(run.val))
    with torch.no_grad():
        assert [task.previews()["samples"].shape[1] for task in (first, second)] == [204, 304]


def test_grids_have_no_more_images_than_there_are_samples(tmp_path, world):
    run = opened(write_file(tmp_path, ("train.n_sample_images", 50), world=world))
    (trainee,) = run.session.trainees(run.val)
    assert len(trainee.task.preview.captions) == 5


def test_the_clip_of_computed_embeddings_measures_too(tmp_path):
    """It is found by the record beside them, or named as decoder.clip, and must still be the same."""
    world = make_world(tmp_path / "bare", member="")
    folder, clip = tmp_path / "emb", make_classifier_file(tmp_path, noised=False)
    compute_embeddings(EmbeddingsConfig((str(tmp_path / "bare"),), clip_path=clip, out_dir=str(folder)), ALONE)
    unet = ("decoder.unets", [{**UNET, "image_embed_dim": 16}])
    metrics = ("evaluate", {"n_evaluation_samples": 5, "FID": {"feature": "clip"}})
    changes = [unet, metrics, ("data.img_embeddings_url", str(folder)), ("data.index_width", None)]
    named = ("decoder.clip", {"make": "diff_dalle", "model": clip})
    found = []
    for more in ([], [named]):
        run = opened(write_file(tmp_path, *changes, *more, world=world))
        trainees = run.session.trainees(run.val)
        with evaluating(trainees):
            found.append(run.session.measure(trainees)())
    identity = load_clip("diff_dalle", clip, "cpu").identity
    assert [*found[0]] == [f"FID (clip {identity})"] and found[0] == found[1]
    make_classifier_file(tmp_path, noised=False, classifier_depth=2)
    with pytest.raises(InputError, match=f"the embeddings are by .*{identity}"):
        opened(write_file(tmp_path, *changes, world=world)).metrics()
    record = folder / "img_emb" / "embeddings.json"
    record.write_text(record.read_text().replace(clip, f"pipe:touch {tmp_path / 'made'}"))
    with pytest.raises(InputError, match="the CLIP of the embeddings is not at pipe:touch"):
        opened(write_file(tmp_path, *changes, world=world)).metrics()
    assert not (tmp_path / "made").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for number, path in enumerate(sorted((folder / "img_emb").glob("*.npy"))):
        np.save(foreign / f"e_{number:02d}.npy", np.load(path))
    foreign_rows = [("data.img_embeddings_url", str(foreign)), ("data.index_width", 0)]
    with pytest.raises(InputError, match="not recorded which CLIP made the embeddings: name it as decoder.clip"):
        opened(write_file(tmp_path, unet, metrics, *foreign_rows, world=world)).metrics()


# ------------------------------------------------------------------------------- the reference's own configuration


@pytest.fixture
def reference(tmp_path):
    """The reference's own test configuration after editing its paths, with a CLIP of ours; ``edit`` changes more."""
    file = json.loads((PUBLISHED / "decoder_smoke.json").read_text())
    make_world(tmp_path / "test_data", shards=10, member="", form="{:d}.tar")
    clip = make_classifier_file(tmp_path, noised=False, classifier_enc_attn_dim=768)
    file["decoder"]["clip"] = {"make": "diff_dalle", "model": clip}
    file["tracker"]["data_path"] = str(tmp_path / "run")

    def written(edit=lambda file: None):
        edit(file)
        path = tmp_path / "test_config.json"
        path.write_text(json.dumps(file))
        return str(path)

    return written


def test_what_metrics_lack_is_said_at_once_and_by_the_check(reference):
    for start in (lambda run: describe_decoder(run, ALONE), lambda run: train_recipe(run.recipe(), ALONE)):
        with pytest.raises(InputError) as error:
            start(read_run_file(reference()))
        for words in ("torch-fidelity", URL, "torchvision", URLS["vgg"], "pip install 'diff_dalle[eval]'"):
            assert words in str(error.value)


def test_the_reference_configuration_runs(reference, tmp_path, monkeypatch):
    """With stand-ins of the packages of metrics; fewer samples and steps than it says, for the time of the tests."""
    (tmp_path / "checkpoints").mkdir()
    eval_making.install(monkeypatch, tmp_path)
    eval_making.save_inception(tmp_path / "checkpoints" / URL.rpartition("/")[2])
    eval_making.save_lpips(tmp_path / "checkpoints" / URLS["vgg"].rpartition("/")[2], "vgg")

    def shorter(file):
        file["data"]["num_workers"] = 0
        file["train"]["epoch_samples"] = 8
        file["decoder"]["timesteps"] = 2

    path = reference(shorter)
    text = describe_decoder(read_run_file(path), ALONE)
    assert "Metrics of 2 images of the split val after each validation: FID, IS, KID, LPIPS." in text
    assert "| train | 8 | 40 |" in text and not (tmp_path / "run").exists()
    train_recipe(read_run_file(path).recipe(), ALONE)
    rows = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "FID" in row]
    assert [row["step"] for row in measured] == [2]  # once, at the end of the only epoch
    assert {"FID", "IS_mean", "IS_std", "KID_mean", "KID_std", "LPIPS"} <= set(measured[0])
    assert all(value is not None for value in measured[0].values())
    names = {each.name for each in (tmp_path / "run").rglob("*")}
    assert {"unet0_model000002.pt", "unet0_samples_000002.png"} <= names and (tmp_path / "latest.pth").exists()


@pytest.mark.slow
def test_the_check_says_what_is_in_the_way(reference, tmp_path):
    def without_metrics(file):
        file["evaluate"] = {}
        file["tracker"]["overwrite_data_path"] = False
        file["train"]["epoch_samples"] = 4
        file["data"]["num_workers"] = 0
        file["decoder"]["timesteps"] = 2

    path = reference(without_metrics)
    train_recipe(read_run_file(path).recipe(), ALONE)
    with pytest.raises(InputError, match="holds a run after 1 step"):
        describe_decoder(read_run_file(path), ALONE)
    replaced = read_run_file(path, "--set", "tracker.overwrite_data_path=True")
    before = sorted((tmp_path / "run").iterdir())
    assert "| train |" in describe_decoder(replaced, ALONE) and sorted((tmp_path / "run").iterdir()) == before
    load = ["tracker.load.load_from=local", "tracker.load.file_path=gone.pth", f"tracker.data_path={tmp_path / 'new'}"]
    with pytest.raises(InputError, match="gone.pth does not exist"):
        describe_decoder(read_run_file(path, *[part for flag in load for part in ("--set", flag)]), ALONE)
