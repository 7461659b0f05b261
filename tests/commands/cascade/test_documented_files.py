"""The published example files, with all of their keys, and what documented keys say and do that need care."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cascade_file_making import frozen_of, read, run, write_file
from released_making import ENCODER, file_of, previewer, stage_a, stage_b, stage_c
from safetensors.torch import save_file
from script_running import run as run_script

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.kinds import TRAINING_COMMANDS
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.config import InputError
from diff_dalle.distributed.rendezvous import ProcessInfo
from diff_dalle.distributed.world import ALONE, World
from diff_dalle.models.latent.stage_a import StageAConfig
from diff_dalle.models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES
from diff_dalle.recipes.train import train_recipe
from diff_dalle.training.loop import Diverged, TrainLoop

QUIET = ("loop.preview_samples", 0)
EMA = [("ema_start_iters", 1), ("ema_iters", 1), ("ema_beta", 0.5)]
PUBLISHED = Path(__file__).parents[2] / "record" / "given" / "documented"
KIND_OF = {"stage_c_3b_lora": "stage_c_lora"}  # else what the name begins with
EXAMPLES = [path.stem for path in sorted(PUBLISHED.glob("*.yaml")) if path.stem != "all_keys"]


def example(name: str) -> str:
    return (PUBLISHED / f"{name}.yaml").read_text()


def parsed(tmp_path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    return parse_cascade([str(tmp_path / "config.yaml")])


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_published_file_is_read_as_it_is(tmp_path, name):
    run, given = parsed(tmp_path, example(name)), yaml.safe_load(example(name))
    kind = "stage_c_controlnet" if name.startswith("controlnet") else KIND_OF.get(name, name[:7])
    assert (run.kind, run.model_version, run.image_size) == (kind, given["model_version"], given["image_size"])
    recipe, batch = run.recipe(), given["batch_size"]
    training, tracking, optim = recipe.training, recipe.tracking, recipe.optims[""]
    assert (training.batch_size, training.microbatch) == (batch, batch // given["grad_accum_steps"])
    assert (training.iterations, training.save_interval) == (given["updates"], given["save_every"])
    assert training.backup_interval == given["backup_every"]
    assert training.sharding.parallel == ("fsdp" if given["use_fsdp"] else "ddp")
    assert training.logdir == f"/path/to/checkpoint/{name}" and tracking.samples_dir == f"/path/to/output/{name}"
    assert (tracking.wandb_project, tracking.wandb_entity) == ("StableCascade", "wandb_username")
    assert (optim.lr, optim.ema_rate, optim.ema_start, optim.ema_every) == (1e-4, (0.9,), 5000, 100)
    assert recipe.data.aspect.multi_aspect_ratio == tuple(given.get("multi_aspect_ratio", ()))
    first, _, last = run.webdataset_path
    assert first == "s3://path/to/your/first/dataset/on/s3" and last == "file:/path/to/your/local/dataset.tar"
    for key in ("effnet", "previewer", "generator", "stage_a"):
        assert getattr(run, f"{key}_checkpoint_path", None) == given.get(f"{key}_checkpoint_path"), key
    assert len(run.dataset_filters) == len(given.get("dataset_filters", []))
    assert run.diffusion.offset_noise == given.get("offset_noise", 0)
    if kind == "stage_c_controlnet":
        params = run.control.params_of(run.control.filter_class)
        names = {"scale_factor": "scale", "thresold": "threshold"}
        for key, value in given["controlnet_filter_params"].items():
            assert getattr(params, names.get(key, key)) == (tuple(value) if isinstance(value, list) else value)
        assert list(run.controlnet.controlnet_blocks) == given["controlnet_blocks"]
    if kind == "stage_c_lora":
        assert run.rank == 4 and run.module_filters == (".attn",)
        assert run.train_tokens == ('["[fernando]", "^dog</w>"]',)


def test_a_wrong_parameter_of_a_filter_is_said_with_its_path_and_line(tmp_path):
    text = example("controlnet_sr")
    line, params = text.splitlines().index("  scale_factor: 0.5") + 1, "controlnet_filter_params"
    for old, new, expected in (
        (
            "scale_factor: 0.5",
            "scala: 1",
            f"{params}.scala (FILE, line {line}) is an unknown setting; did you mean",
        ),
        (
            "scale_factor: 0.5",
            "scale: 3",
            f"{params}.scale (FILE, line {line}) is 3, but must be above 0",
        ),
        ("noise: 0.1", "noise: x", f"offset_noise (FILE, line {line + 1}) is 'x', but must be a number"),
        ("SREffnetFilter", "srr", f"controlnet_filter (FILE, line {line - 2}) is 'srr', but must be one"),
    ):
        with pytest.raises(InputError) as found:
            parsed(tmp_path, text.replace(old, new))
        said = str(found.value).replace(f"{tmp_path}/config.yaml", "FILE")
        assert said.startswith(expected) and "\n" not in said


# ------------------------------------------------------------------------------------------------ keys with a default


def test_tf32_is_set_at_the_root(tmp_path):
    run = read("semantic", tmp_path, "w", ("allow_tf32", True))
    assert run.distributed.allow_tf32 and not read("semantic", tmp_path, "w").distributed.allow_tf32
    with pytest.raises(InputError, match=r"^allow_tf32 \(.*yaml, line \d+\) is 'perhaps', but must be"):
        read("semantic", tmp_path, "w", ("allow_tf32", "perhaps"))


def test_weights_are_written_as_safetensors_too(tmp_path, world):
    """With the averages; usable where a checkpoint is asked for, and removed with the checkpoint."""
    usual = [*EMA, QUIET, ("checkpoint_extension", "safetensors"), ("loop.keep_checkpoints", 1)]
    run("semantic", tmp_path, world, *usual, ("updates", 2), ("save_every", 1))
    folder = tmp_path / "run"
    names = [f"{stem}000002.safetensors" for stem in ("ema_0.5_", "model")]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    for name in names:
        found, other = (load_file(str(folder / name).replace(".safetensors", end)) for end in (".safetensors", ".pt"))
        state, expected = found.pop("state"), other.pop("state")
        assert found == other and found["step"] == 2
        assert all(torch.equal(state[key], expected[key]) and state[key].dtype == expected[key].dtype for key in state)
    path = str(folder / "ema_0.5_000002.safetensors")
    assert open_network(path, "semantic").load(torch.device("cpu")).config.stride == 8
    frozen_ = [("effnet_checkpoint_path", path), ("generator_checkpoint_path", None)]
    run("stage_c", tmp_path / "c", world, *frozen_, QUIET, ("updates", 1))
    run("semantic", tmp_path / "again", world, QUIET, ("generator_checkpoint_path", path), ("updates", 1))
    run("semantic", tmp_path, world, *usual, ("updates", 3))  # resumes
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [
        name.replace("000002", "000003") for name in names
    ]


def test_sharded_weights_are_not_written_as_safetensors(tmp_path):
    sharded = read("semantic", tmp_path, "w", ("checkpoint_extension", "safetensors"), ("use_fsdp", True))
    sharded.recipe().open(ALONE)
    with pytest.raises(InputError, match="checkpoint_extension is safetensors, but weights that are divided among"):
        sharded.recipe(2).open(World(ProcessInfo("mpi", 0, 2), "cpu"))


def test_a_folder_of_files_for_processes_is_noted_once(tmp_path, capsys):
    note = "Note: dist_file_subfolder is not used: processes do not find each other by a file."
    for folder in ("", "files/"):
        read("semantic", tmp_path, "w", ("dist_file_subfolder", folder)).recipe().open(ALONE)
        assert capsys.readouterr().out.splitlines().count(note) == bool(folder)


def test_a_missing_wandb_is_told_before_any_work(tmp_path, monkeypatch, capsys):
    """In the words of the file, and after the settings of a dry run."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = r"tracker wandb needs a package .* `pip install 'diff_dalle\[wandb\]'`, or remove wandb from wandb_project$"
    with pytest.raises(InputError, match=words):
        train_recipe(read("semantic", tmp_path, "nowhere", ("wandb_project", "p")).recipe(), ALONE)
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()
    path = write_file("semantic", tmp_path, "nowhere", ("wandb_project", "p"))
    result = run_script("train_cascade.py", path, "--dry_run", ok=False)
    assert result.returncode == 2 and re.search(words, result.stderr.strip()) and "wandb_project: p" in result.stdout


# ----------------------------------------------------------------------------------------- files of the public networks


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_public_files_are_named_with_the_command_that_converts_them(tmp_path, frozen, ending, capsys):
    """Before the run begins; the files of a semantic encoder together."""
    shapes = {
        "effnet_encoder": ENCODER,
        "previewer": previewer(5, 8),
        "stage_a": stage_a(StageAConfig(width=8, bottleneck_blocks=1, codebook_size=20)),
        "stage_b": {name: (1,) for name in stage_b(STAGE_B_SIZES["700M"])},
        "stage_c": {name: (1,) for name in stage_c(STAGE_C_SIZES["1B"])},
    }
    paths = {name: str(tmp_path / f"{name}.{ending}") for name in shapes}
    for name, path in paths.items():
        save_file(file_of(shapes[name]), path) if ending == "safetensors" else torch.save(file_of(shapes[name]), path)
    own, effnet = paths["stage_a"], ("effnet_checkpoint_path", paths["effnet_encoder"])
    good_c, good_b = frozen_of("stage_c", frozen), frozen_of("stage_b", frozen)
    both = f"{paths['effnet_encoder']},{paths['previewer']}"
    generator = "generator_checkpoint_path"
    cases = [
        ("stage_c", [effnet], effnet, f"semantic --weights {paths['effnet_encoder']} --out semantic.pt"),
        ("stage_c", [effnet, ("previewer_checkpoint_path", paths["previewer"])], effnet, f"semantic --weights {both} "),
        ("stage_b", [*good_b, ("stage_a_checkpoint_path", own)], ("stage_a_checkpoint_path", own), "stage_a --weights"),
        ("stage_c", [*good_c, (generator, paths["stage_c"])], None, "stage_c --model_version 1B --weights"),
        ("stage_b", [*good_b, (generator, paths["stage_b"])], None, "stage_b --model_version 700M --weights"),
        ("stage_a", [(generator, own)], None, f"stage_a --weights {own} --out stage_a.pt, and give that"),
    ]
    for kind, changes, named, command in cases:
        setting, path = named or changes[-1]
        said = f"{setting} is {path}, which holds the weights of a public network: make a checkpoint of it by "
        with pytest.raises(InputError) as found:
            train_recipe(read(kind, tmp_path, "nowhere", *changes).recipe(), ALONE)
        assert str(found.value).startswith(f"{said}diff-dalle import_cascade --stage {command}"), kind
    assert capsys.readouterr().out == ""
    lora = read_lora(tmp_path, [*good_c, (generator, paths["stage_c"])])
    with pytest.raises(InputError, match=r"import_cascade --stage stage_c --model_version 3.6B\|1B --weights"):
        parse(TRAINING_COMMANDS["stage_c_lora"].config_class, ["--config", lora])


def read_lora(folder, changes) -> str:
    path = write_file("stage_c", folder, "nowhere", *changes, ("kind", "stage_c_lora"), ("rank", 2))
    content = yaml.safe_load((folder / "stage_c.yaml").read_text())
    del content["model_version"], content["model"]
    (folder / "stage_c.yaml").write_text(yaml.safe_dump(content))
    return path


def test_own_files_and_missing_ones_are_left_to_what_reads_them(tmp_path, world, frozen):
    read("stage_b", tmp_path, world, *frozen_of("stage_b", frozen)).recipe().open(ALONE)
    for path in ("nowhere.pt", "nowhere.safetensors", str(tmp_path)):
        settings = read("stage_c", tmp_path, world, ("effnet_checkpoint_path", path))
        with pytest.raises(InputError):
            settings.recipe().open(ALONE)


# ------------------------------------------------------------------------------------------- messages of shared code


def test_a_changed_batch_is_told_as_the_file_counts_it(tmp_path, world):
    run("semantic", tmp_path, world, QUIET, ("updates", 1))
    larger = ("batch_size", 8)
    words = "4 samples per step, but now a step has 8, those of 1 process: set batch_size so that it has as many"
    with pytest.raises(InputError, match=words):
        run("semantic", tmp_path, world, QUIET, larger, ("updates", 2))
    run("semantic", tmp_path, world, QUIET, larger, ("updates", 2), ("loop.accept_changed_batch", True))
    assert load_file(str(tmp_path / "run" / "model000002.pt"))["samples"] == 12


def test_errors_name_the_keys_of_the_file(tmp_path, world, monkeypatch):
    with pytest.raises(InputError, match="^dataset_filters rejects all samples"):
        run("semantic", tmp_path, world, ("dataset_filters", [["score", "lambda s: s > 4.5"]]))
    run("semantic", tmp_path, world, QUIET, ("updates", 1))
    with pytest.raises(
        InputError,
        match="other settings: .*; .*or choose another experiment_id, where .*: loop.resume_checkpoint",
    ):
        run("semantic", tmp_path, world, QUIET, ("updates", 1), ("loop.seed", 7))
    monkeypatch.setattr(TrainLoop, "update", diverge)
    with pytest.raises(Diverged, match="so training has diverged: lower lr or raise warmup_updates. The last"):
        run("semantic", tmp_path / "bad", world, QUIET)


def diverge(loop, batch):
    for trainee in loop.trainees:
        trainee.consecutive_bad_steps = lambda: loop.config.max_bad_steps
    loop.step += 1
