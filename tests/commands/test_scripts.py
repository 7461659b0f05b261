"""The scripts at tiny sizes: train, kill, resume, several processes, sample, evaluate, invalid input."""

import json
import os
import signal
import sys
import tarfile
from unittest import mock

import numpy as np
import pytest
from checkpoint_making import samples_in
from PIL import Image
from script_running import TWO, hashes, json_lines, losses, run, start_training, train

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.recipes import train as training
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

GENERATOR = {"iterations": 6, "batch_size": 8, "save_interval": 3, "eval_interval": 3, "eval_samples": 16}
CLASSIFIER = {"iterations": 6, "batch_size": 8, "save_interval": 3, "eval_interval": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_shapes(ShapesConfig(image_size=16, train_samples=64, val_samples=16, samples_per_shard=16), str(folder))
    return folder


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    logdir = tmp_path_factory.mktemp("trained")
    train(logdir, world / "train", **GENERATOR, val_data_dir=world / "val", process=True)
    return logdir


def test_training_writes_checkpoints_and_logs(trained):
    expected = {"model000003.pt", "ema_0.9_000003.pt", "opt000006.pt", "run.json", "progress.csv", "log.txt"}
    assert expected <= set(os.listdir(trained))
    held_out = [row for row in json_lines(trained / "progress.jsonl") if "held_out/loss" in row]
    assert [row["step"] for row in held_out] == [3, 6]
    assert {"held_out/loss_q0", "held_out/caption_swap_gap"} <= held_out[0].keys()


KILLED = """
import os, runpy, signal, sys
from diff_dalle.training.loop import TrainLoop

update = TrainLoop.update

def killed(self, batch):
    update(self, batch)
    if self.step == 5:
        self.saving.finish()  # or the first checkpoint may not be whole yet
        os.kill(os.getpid(), signal.SIGKILL)

TrainLoop.update = killed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill_and_resume(logdir, data, **flags):
    """SIGKILL two steps after the first checkpoint, then the same command again, which repeats them."""
    first = start_training(logdir, data, before=("-c", KILLED), **flags)
    output = first.communicate()[0]
    assert first.returncode == -signal.SIGKILL, output
    result = train(logdir, data, **flags, process=True)
    assert "Resuming at step 3" in result.stdout


def test_a_killed_run_resumes_exactly(trained, world, tmp_path):
    """All files equal those of the uninterrupted run."""
    kill_and_resume(tmp_path, world / "train", **GENERATOR, val_data_dir=world / "val")
    assert hashes(tmp_path) == hashes(trained)


def test_one_two_one_processes_resume_each_other(trained, world, tmp_path):
    """Two have half the batch each, under mpiexec."""
    for iterations, batch, launcher in ((2, 8, ()), (4, 4, TWO), (6, 8, ())):
        train(tmp_path, world / "train", launcher, iterations=iterations, batch_size=batch)
    one, other = losses(trained), losses(tmp_path)
    assert one.keys() == other.keys() == {1, 2, 3, 4, 5, 6}
    assert all(abs(one[step] - other[step]) < 1e-5 for step in one)


def test_microbatches_and_loss_aware_timesteps(world, tmp_path):
    flags = {"learn_sigma": True, "rescale_learned_sigmas": True, "schedule_sampler": "loss-second-moment"}
    for size in (0, 3):
        train(tmp_path / str(size), world / "train", iterations=3, batch_size=8, microbatch=size, **flags)
    whole, pieces = losses(tmp_path / "0"), losses(tmp_path / "3")
    assert len(whole) == 3 and all(abs(whole[step] - pieces[step]) < 1e-5 for step in whole)


def samples(logdir):
    return samples_in(logdir)


def test_sampling_needs_a_path_only_and_is_the_same_on_any_number_of_processes(trained, tmp_path):
    flags = f"--model_path {trained}/ema_0.9_000006.pt --prompts 'a red circle|two blue squares|' --num_samples 4"
    flags += " --steps 2 --device cpu --sampler ancestral"
    run("sample.py", flags, "--logdir", tmp_path / "one")
    run("sample.py", flags, "--batch_size", 1, "--logdir", tmp_path / "two", ranks=2)
    one, other = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert one.shape == (4, 16, 16, 3) and one.dtype == np.uint8
    assert np.abs(one.astype(int) - other).max() <= 1
    assert len(list((tmp_path / "one").glob("0*.png"))) == 4
    assert np.array_equal(np.asarray(Image.open(tmp_path / "one/000003.png")), one[3])
    captions = (tmp_path / "one/captions.txt").read_text().splitlines()
    assert captions[1] == "000001\t1\ttwo blue squares" and len(captions) == 4


def test_a_cascade_is_trained_and_sampled_on_any_number_of_processes(world, tmp_path):
    """The same script trains base and upsamplers, with and without text; one command samples from all of them."""
    short, no_text = {"iterations": 1, "batch_size": 2}, {"enc_attn_dim": 0, "caption_dropout": 0}
    augmented = {"noise_augmentation": 0.3, "gaussian_blur": True, "crop_size": 8}
    train(tmp_path / "8", world / "train", image_size=8, **short)
    train(tmp_path / "16", world / "train", small_size=8, low_res_skip=True, prediction="x_start", **short, **no_text)
    train(tmp_path / "32", world / "train", image_size=32, small_size=16, **augmented, **short)
    base, middle, top = (tmp_path / size / "ema_0.9_000001.pt" for size in ("8", "16", "32"))
    flags = (
        f"--model_path {base} --upsampler_paths {middle},{top} --prompts 'a red circle|a cross|' --noise_level 0,0.2"
    )
    flags += " --steps 3 --upsampler_steps 2,2 --upsampler_seed 50 --sample_size 32,48"
    flags += " --device cpu --precision fp32"
    run("sample.py", flags, "--logdir", tmp_path / "one")
    run("sample.py", flags, "--upsampler_batch_size", 1, "--logdir", tmp_path / "two", ranks=2)
    one, two = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert one.shape == (3, 32, 48, 3) and one.std() > 5
    assert np.abs(one.astype(int) - two).max() <= 1


def test_grayscale_cascades_are_trained_and_sampled(world, tmp_path):
    """One channel from decoding to the PNG, through previews, a held-out evaluation and an upsampler."""
    flags = {"iterations": 1, "batch_size": 2, "image_channels": 1, "sample_interval": 1, "preview_samples": 2}
    flags |= {"val_data_dir": world / "val", "eval_interval": 1, "eval_samples": 4, "preview_steps": 2}
    train(tmp_path / "8", world / "train", image_size=8, **flags)
    train(tmp_path / "16", world / "train", small_size=8, low_res_skip=True, prediction="x_start", **flags)
    logged = {name for row in json_lines(tmp_path / "16/progress.jsonl") for name in row}
    assert {"held_out/psnr", "held_out/bicubic_psnr"} <= logged
    base, upsampler = (tmp_path / size / "ema_0.9_000001.pt" for size in ("8", "16"))
    flags = f"--model_path {base} --upsampler_paths {upsampler} --prompts 'a red circle|a cross' --steps 2"
    run("sample.py", flags, "--upsampler_steps", 2, "--logdir", tmp_path / "samples")
    images = samples(tmp_path / "samples")
    assert images.shape == (2, 16, 16, 3) and images.std() > 5
    assert (images == images[..., :1]).all()


def test_sampling_by_captions_sizes_and_seed_flags(trained, world, tmp_path):
    common = f"--model_path {trained}/model000006.pt --timestep_respacing ddim2 --use_ddim True --logdir {tmp_path}/"
    size = "--sample_size 16,24 --image_size 16 --num_channels 16 --noise_schedule cosine"
    run("sample.py", f"{common}a --data_dir {world}/val --num_samples 3", size)
    assert samples(tmp_path / "a").shape == (3, 16, 24, 3)
    (tmp_path / "texts.txt").write_text("a red circle\n\na blue square\n")
    run("sample.py", f"{common}b --prompts_file {tmp_path}/texts.txt")
    assert len((tmp_path / "b/captions.txt").read_text().splitlines()) == 2


def test_evaluation_writes_report_scores_and_images(trained, world, tmp_path):
    flags = f"--model_path {trained}/ema_0.9_000006.pt --prompts_per_task 2 --steps 2 --shapes_dir {world}"
    run("evaluate.py", flags, "--report_dir", tmp_path, "--progress", trained / "progress.csv")
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert scores["all attributes"]["ceiling"] == 1.0 and scores["all attributes"]["n"] == 2
    report = (tmp_path / "report.md").read_text()
    assert all(name in report for name in ("grid.png", "loss.png", "caption_swap_gap.png", "all attributes"))


@pytest.fixture(scope="module")
def models(trained, classified):
    """Flags."""
    return f"--model_path {trained}/ema_0.9_000006.pt --classifier_path {classified}/best.pt --steps 2"


@pytest.mark.slow
def test_evaluation_compares_ways_of_guiding(trained, models, world, tmp_path):
    """Guidance settings scored by ShapeEval and, for captions of any data, by the classifier."""
    data = f"--shapes_dir {world} --prompts_per_task 2 --guidance_prompts 3", f"--data_dir {world}/val --num_samples 2"
    for folder, n, own in zip((tmp_path / "a", tmp_path / "b"), (3, 2), data, strict=True):
        run("evaluate.py", models, own, f"--classifier_scale 0,2 --report_dir {folder}")
        scores, report = json.loads((folder / "scores.json").read_text()), (folder / "report.md").read_text()
        ways = [(way["guidance_scale"], way["classifier_scale"], way["text_conditional"]) for way in scores["guidance"]]
        assert ways == [(1, 0, True), (1, 2, True), (3, 0, True), (3, 2, True), (1, 0, False), (1, 2, False)]
        assert all(way["n"] == n and 0 <= way["low"] <= way["value"] <= way["high"] <= 1 for way in scores["guidance"])
        assert len(scores["retrieval"]) == 11
        assert all(name in report for name in ("guidance.png", "guidance_grid.png", "retrieval.png", "noised CLIP 2"))
    assert "all attributes" in (tmp_path / "a/report.md").read_text()
    assert "Noised-CLIP score" in report and len(scores["similarity"]) == 7
    assert all(-1 <= value <= 1 for row in scores["similarity"].values() for value in row.values())
    result = run("evaluate.py", f"--model_path {trained}/ema_0.9_000006.pt --data_dir {world}/val", ok=False)
    assert result.returncode == 2 and "--data_dir needs --classifier_path" in result.stderr


def test_a_sweep_samples_the_same_images_with_every_scale(trained, models, tmp_path):
    prompts = "--prompts 'a red circle|a cross'"
    run("sample.py", models, prompts, f"--classifier_scale 0,40 --logdir {tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("classifier_scale_0", "classifier_scale_40", "grid.jpg", "samples.json"),
    ]
    plain, guided = (samples(tmp_path / f"classifier_scale_{scale}") for scale in (0, 40))
    assert plain.shape == guided.shape and (plain != guided).any()
    run("sample.py", f"--model_path {trained}/ema_0.9_000006.pt --steps 2 --logdir {tmp_path}/b", prompts)
    assert np.array_equal(plain, samples(tmp_path / "b"))


BAD = {
    "impossible size": ({"image_size": 15}, "image_size is 15, but must be a multiple of 2"),
    "no limit": ({"iterations": 0}, "iterations"),
}


def test_invalid_input_ends_a_process_with_status_2():
    result = run("train_generator.py", "--num_chanels", 8, ok=False, launcher=[sys.executable])
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_is_one_sentence_and_status_2(world, tmp_path, case):
    flags, words = BAD[case]
    result = train(tmp_path, world / "train", ok=False, **{"iterations": 1, **flags})
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_the_folder_of_another_configuration_is_refused_and_unchanged(trained, world):
    before = hashes(trained)
    result = train(trained, world / "train", ok=False, iterations=6, batch_size=8, seed=5)
    assert result.returncode == 2 and "seed (0 → 5)" in result.stderr
    assert hashes(trained) == before


def test_a_signal_to_the_whole_job_spares_the_data_workers(world, tmp_path):
    """Spawned workers inherit no handler, but the run saves all the same."""
    flags = {"iterations": 100_000, "batch_size": 4, "worker_start": "spawn"}
    process = start_training(tmp_path, world / "train", start_new_session=True, **flags)
    for line in process.stdout:
        if "step 3 of" in line:
            os.killpg(process.pid, signal.SIGUSR1)
            break
    output = process.stdout.read()
    assert process.wait() == 128 + signal.SIGUSR1 and "Stopping early" in output, output


def test_terminated_training_saves_and_resumes(world, tmp_path):
    """Meanwhile a second run in its log directory is refused; afterwards, one on other data."""
    process = start_training(tmp_path, world / "train", iterations=100_000, batch_size=4)
    for line in process.stdout:
        if "step 3 of" in line:
            second = train(tmp_path, world / "train", ok=False, iterations=100_000, batch_size=4)
            assert second.returncode == 2 and f"is in use by process {process.pid} on" in second.stderr
            process.send_signal(signal.SIGTERM)
            break
    output = process.stdout.read()
    assert process.wait() == 143 and "Finishing this step and saving\n" in output and "Stopping early" in output
    saved = json.loads((tmp_path / "run.json").read_text())["checkpoints"][-1]["step"]
    assert saved >= 3
    other = train(tmp_path, world / "val", ok=False, iterations=saved + 1, batch_size=4)
    assert other.returncode == 2 and "--data_dir differs from the data of step" in other.stderr
    result = train(tmp_path, world / "train", iterations=saved + 1, batch_size=4)
    assert f"Resuming at step {saved:,}" in result.stdout


def test_no_secret_is_recorded(world, tmp_path):
    """Neither in checkpoints, records or logs, nor in what trackers get."""
    shard = sorted((world / "train").glob("*.tar"))[0]
    data = f"pipe:cat {shard} # --header 'Authorization: Bearer s3cr3t.w0rd'"
    logdir, cache = tmp_path / "run", {"index_cache": tmp_path / "index", "shard_cache": tmp_path / "shards"}
    with mock.patch.object(training, "create_trackers", wraps=training.create_trackers) as created:
        train(logdir, data, iterations=1, batch_size=4, trackers="console,log,csv,jsonl,tensorboard", **cache)
    assert "--header" in str(created.call_args) and "s3cr3t" not in str(created.call_args)  # what wandb gets
    files = [path for path in logdir.rglob("*") if path.is_file()]
    assert {"run.json", "model000001.pt"} <= {path.name for path in files} and any("tfevents" in p.name for p in files)
    assert [path.name for path in files if b"s3cr3t" in path.read_bytes()] == []
    assert "cat" in (logdir / "run.json").read_text()
    assert (
        "Resuming at step 1"
        in train(logdir, data.replace("s3cr3t", "other"), iterations=2, batch_size=4, **cache).stdout
    )


# ---------------------------------------------------------------------------------------------------- the classifier


def train_classifier(logdir, world, ok=True, process=False, ranks=1, **changed):
    flags = {**CLASSIFIER, "val_data_dir": world / "val", **changed}
    return train(logdir, world / "train", (), ok, "train_classifier.py", process, ranks, **flags)


@pytest.fixture(scope="module")
def classified(world, tmp_path_factory):
    logdir = tmp_path_factory.mktemp("classified")
    train_classifier(logdir, world, process=True)
    return logdir


def test_classifier_training_writes_checkpoints_and_logs(classified):
    expected = {"model000003.pt", "ema_0.9_000006.pt", "opt000006.pt", "best.pt", "retrieval.png"}
    assert expected <= set(os.listdir(classified))
    held_out = {row["step"]: row for row in json_lines(classified / "progress.jsonl") if "held_out/loss" in row}
    assert list(held_out) == [3, 6]
    assert {"held_out/retrieval.image_to_text_at_1_t090", "held_out/candidates"} <= held_out[3].keys()
    best = json.loads((classified / "run.json").read_text())["best"][""]
    assert best["loss"] == min(row["held_out/loss"] for row in held_out.values())
    assert load_file(str(classified / "best.pt"))["step"] == best["step"]
    assert np.asarray(Image.open(classified / "retrieval.png")).std() > 10
    log = (classified / "log.txt").read_text()
    assert log.count("Retrieval among 16 by noise level") == 2 and "| chance | 0.062 |" in log


@pytest.mark.slow
def test_a_killed_classifier_resumes_exactly(classified, world, tmp_path):
    kill_and_resume(tmp_path, world / "train", script="train_classifier.py", **CLASSIFIER, val_data_dir=world / "val")
    assert hashes(tmp_path) == hashes(classified) and "best.pt" in hashes(tmp_path)
    assert (tmp_path / "retrieval.png").read_bytes() == (classified / "retrieval.png").read_bytes()


def test_two_processes_with_microbatches_train_the_classifier_of_one(classified, world, tmp_path):
    train_classifier(tmp_path, world, ranks=2, batch_size=4, microbatch=2)
    one, two = losses(classified), losses(tmp_path)
    assert len(one) == 6 and all(abs(one[step] - two[step]) < 1e-5 * one[step] for step in one)
    one, two = losses(classified, "held_out/loss"), losses(tmp_path, "held_out/loss")
    assert one.keys() == {3, 6} and all(abs(one[step] - two[step]) < 1e-5 * one[step] for step in one)


BAD_CLASSIFIER = {
    "a single sample": ({"batch_size": 1}, "batch_size is 1, but a contrastive loss needs at least 2 samples"),
    "nothing held out": ({"val_data_dir": "EMPTY"}, "--val_data_dir"),
    "no captions": ({"data_dir": "NO_CAPTIONS"}, "holds no captions"),
}


@pytest.mark.parametrize("case", BAD_CLASSIFIER)
def test_invalid_input_for_a_classifier_is_one_sentence_and_status_2(world, tmp_path, case):
    flags, words = BAD_CLASSIFIER[case]
    folders = {"EMPTY": tmp_path / "empty", "NO_CAPTIONS": tmp_path / "no_captions"}
    for folder in folders.values():
        folder.mkdir()
    shard = next((world / "val").glob("*.tar"))
    with tarfile.open(shard) as full, tarfile.open(tmp_path / "no_captions" / "0.tar", "w") as images:
        for member in full.getmembers():
            if member.name.endswith(".png"):
                images.addfile(member, full.extractfile(member))
    flags = {name: folders.get(value, value) for name, value in flags.items()}
    result = train_classifier(tmp_path / "run", world, ok=False, **{"iterations": 1, **flags})
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr
