"""The published example files, with all of their keys, and what documented keys say and do that need care."""

import re
import sys

import pytest
import torch
import yaml
from cascade_file_making import frozen_of, make_frozen, make_world, read, run, write_file
from refusing import refused
from released_making import ENCODER, file_of, previewer, stage_a, stage_b, stage_c
from safetensors.torch import save_file
from script_running import run as run_script

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.kinds import TRAINING_COMMANDS
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.distributed import devices
from diff_dalle.distributed.rendezvous import ProcessInfo
from diff_dalle.distributed.world import ALONE, World
from diff_dalle.errors import InputError
from diff_dalle.models.latent.stage_a import StageAConfig
from diff_dalle.models.latent.stage_b import STAGE_B_SIZES
from diff_dalle.models.latent.stage_c import STAGE_C_SIZES
from diff_dalle.recipes.train import train
from diff_dalle.training.loop import Diverged, TrainLoop

QUIET = ("loop.preview_samples", 0)
EMA = [("ema_start_iters", 1), ("ema_iters", 1), ("ema_beta", 0.5)]
RATIOS = ["1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16"]
SHARED = """
checkpoint_path: /path/to/checkpoint
output_path: /path/to/output
wandb_project: StableCascade
wandb_entity: wandb_username
lr: 1.0e-4
warmup_updates: 1
ema_start_iters: 5000
ema_iters: 100
ema_beta: 0.9
webdataset_path:
  - s3://path/to/your/first/dataset/on/s3
  - s3://path/to/your/second/dataset/on/s3
  - file:/path/to/your/local/dataset.tar
effnet_checkpoint_path: models/effnet_encoder.safetensors
"""
STAGE_C = "previewer_checkpoint_path: models/previewer.safetensors\n"
CONTROL = """
captions_getter: ['txt', identity]
dataset_filters:
   - ['width', 'lambda s: s >= 768']
   - ['height', 'lambda s: s >= 768']
generator_checkpoint_path: models/stage_c_bf16.safetensors
"""
EDGES = "controlnet_blocks: [0, 4, 8, 12, 51, 55, 59, 63]\n"
LORA = """
module_filters: ['.attn']
rank: 4
train_tokens:
  - ['[fernando]', '^dog</w>']
generator_checkpoint_path: models/stage_c_bf16.safetensors
"""
# Each has a kind, model_version, the KEYS below (of the aspect ratios all or none), and use_fsdp.
TABLE = """
stage_c_3b           stage_c             3.6B  512  768 True  1 100000 20000 2000 True
stage_c_3b_lowres    stage_c             3.6B 1024  384 True  1 100000 20000 2000 True
stage_c_1b           stage_c               1B 1024  768 False 1  10000 20000 2000 True
stage_c_3b_lora      stage_c_lora        3.6B   32  768 True  4  10000  1000  100 False
stage_b_3b           stage_b               3B  256 1024 False 1 100000 20000 1000 True
stage_b_700m         stage_b             700M  512 1024 False 1  10000 20000 2000 True
controlnet_canny     stage_c_controlnet  3.6B  256  768 False 1  10000  2000 1000 True
controlnet_inpaint   stage_c_controlnet  3.6B  256  768 False 1  10000  2000 1000 True
controlnet_sr        stage_c_controlnet  3.6B  256  768 False 1  30000  5000 1000 True
controlnet_identity  stage_c_controlnet  3.6B  256  768 False 1 200000  2000 1000 True
"""
EXAMPLES = {name: row for name, *row in map(str.split, TABLE.strip().splitlines())}
KEYS = ("batch_size", "image_size", "multi_aspect_ratio", "grad_accum_steps", "updates", "backup_every", "save_every")
STAGE_B = """
shift: 4
adaptive_loss_weight: True
stage_a_checkpoint_path: models/stage_a.safetensors
generator_checkpoint_path: models/stage_b_bf16.safetensors
"""
REST = {
    "stage_c_3b": f"{STAGE_C}adaptive_loss_weight: True\ngenerator_checkpoint_path: models/stage_c_bf16.safetensors",
    "stage_c_3b_lowres": f"""{STAGE_C}adaptive_loss_weight: True
captions_getter: ['json', captions_getter]
dataset_filters:
   - ['aesthetic_score', 'lambda s: s > 4.5']
   - ['nsfw_probability', 'lambda s: s < 0.01']
""",
    "stage_c_1b": STAGE_C,
    "stage_c_3b_lora": STAGE_C + LORA,
    "stage_b_3b": STAGE_B,
    "stage_b_700m": STAGE_B,
    "controlnet_canny": f"""{STAGE_C}{CONTROL}{EDGES}controlnet_filter: CannyFilter
controlnet_filter_params:
  resize: 224
""",
    "controlnet_inpaint": f"""{STAGE_C}{CONTROL}{EDGES}controlnet_filter: InpaintFilter
controlnet_filter_params:
  thresold: [0.04, 0.4]
  p_outpaint: 0.4
offset_noise: 0.1
""",
    "controlnet_sr": f"""{STAGE_C}{CONTROL}{EDGES}controlnet_bottleneck_mode: large
controlnet_filter: SREffnetFilter
controlnet_filter_params:
  scale_factor: 0.5
offset_noise: 0.1
""",
    "controlnet_identity": f"""{STAGE_C}{CONTROL}controlnet_blocks: {[*range(64)]}
controlnet_bottleneck_mode: simple
controlnet_filter: IdentityFilter
controlnet_filter_params:
  max_faces: 4
  p_drop: 0.05
  p_full: 0.3
""",
}


def example(name: str) -> str:
    _, version, *values, fsdp = EXAMPLES[name]
    given = dict(zip(KEYS, values, strict=True))
    if given.pop("multi_aspect_ratio") == "True":
        given["multi_aspect_ratio"] = f"[{', '.join(RATIOS)}]"
    given |= {"experiment_id": name, "model_version": version, "use_fsdp": fsdp}
    return "".join(f"{key}: {value}\n" for key, value in given.items()) + SHARED + REST[name] + "\n"


def parsed(tmp_path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    return parse_cascade([str(tmp_path / "config.yaml")])


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_published_file_is_read_as_it_is(tmp_path, name):
    run, (kind, version, *numbers, fsdp) = parsed(tmp_path, example(name)), EXAMPLES[name]
    batch, pixels, ratios, accumulated, updates, backup, save = map(yaml.safe_load, numbers)
    assert (run.kind, run.model_version, run.image_size) == (kind, version, pixels)
    recipe = run.recipe()
    training, tracking, optim = recipe.training, recipe.tracking, recipe.optims[""]
    assert (training.batch_size, training.microbatch, training.iterations) == (batch, batch // accumulated, updates)
    assert (training.save_interval, training.backup_interval) == (save, backup)
    assert training.sharding.parallel == ("fsdp" if fsdp == "True" else "ddp")
    assert training.logdir == f"/path/to/checkpoint/{name}" and tracking.samples_dir == f"/path/to/output/{name}"
    assert (tracking.wandb_project, tracking.wandb_entity) == ("StableCascade", "wandb_username")
    assert (optim.lr, optim.ema_rate, optim.ema_start, optim.ema_every) == (1e-4, (0.9,), 5000, 100)
    assert recipe.data.aspect.multi_aspect_ratio == (tuple(RATIOS) if ratios else ())
    first, _, last = run.webdataset_path
    assert first == "s3://path/to/your/first/dataset/on/s3" and last == "file:/path/to/your/local/dataset.tar"
    assert run.effnet_checkpoint_path == "models/effnet_encoder.safetensors"
    given = yaml.safe_load(REST[name])
    for key in ("previewer_checkpoint_path", "generator_checkpoint_path", "stage_a_checkpoint_path"):
        assert getattr(run, key, None) == given.get(key), key
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


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, world):
    return make_frozen(tmp_path_factory.mktemp("frozen"), world)


def test_tf32_is_a_setting_of_cuda_devices(tmp_path, monkeypatch):
    """Also for the networks that a run loads later, which do not say it."""
    run = read("semantic", tmp_path, "w", ("allow_tf32", True))
    assert run.distributed.allow_tf32 and not read("semantic", tmp_path, "w").distributed.allow_tf32
    with pytest.raises(InputError, match=r"^allow_tf32 \(.*yaml, line \d+\) is 'perhaps', but must be"):
        read("semantic", tmp_path, "w", ("allow_tf32", "perhaps"))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    monkeypatch.setattr(devices, "_allow_tf32", False)

    def switches(name: str, allow: bool | None) -> tuple[str, bool]:
        monkeypatch.setattr(devices, "pick_device", lambda name, place: torch.device(name))
        devices.use_device(name, allow_tf32=allow)
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    try:
        assert switches("cuda", None) == switches("cpu", True) == ("highest", False)
        assert switches("cuda", True) == switches("cuda", None) == ("high", True)
        assert switches("cuda", False) == switches("cuda", None) == ("highest", False)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


def test_weights_are_written_as_safetensors_too(tmp_path, world):
    """With the averages; usable where a checkpoint is asked for, and removed with the checkpoint."""
    wanted = ("checkpoint_extension", "safetensors")
    run("semantic", tmp_path, world, *EMA, QUIET, wanted, ("loop.keep_checkpoints", 1))
    folder = tmp_path / "run"
    names = [f"{stem}000004.safetensors" for stem in ("ema_0.5_", "model")]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    for name in names:
        found, other = (load_file(str(folder / name).replace(".safetensors", end)) for end in (".safetensors", ".pt"))
        state, expected = found.pop("state"), other.pop("state")
        assert found == other and found["step"] == 4
        assert all(torch.equal(state[key], expected[key]) and state[key].dtype == expected[key].dtype for key in state)
    path = str(folder / "ema_0.5_000004.safetensors")
    assert open_network(path, "semantic").load(torch.device("cpu")).config.stride == 8
    frozen_ = [("effnet_checkpoint_path", path), ("generator_checkpoint_path", None)]
    run("stage_c", tmp_path / "c", world, *frozen_, QUIET, ("updates", 1))
    run("semantic", tmp_path / "again", world, QUIET, ("generator_checkpoint_path", path), ("updates", 1))
    run("semantic", tmp_path, world, *EMA, QUIET, wanted, ("updates", 5), ("loop.keep_checkpoints", 1))  # resumes
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [name.replace("4", "5") for name in names]


def test_other_formats_of_checkpoints_are_refused(tmp_path):
    with refused("checkpoint_extension is 'ckpt', but must be one of pt, safetensors"):
        read("semantic", tmp_path, "w", ("checkpoint_extension", "ckpt"))
    sharded = read("semantic", tmp_path, "w", ("checkpoint_extension", "safetensors"), ("use_fsdp", True))
    sharded.recipe().open(ALONE)
    with pytest.raises(InputError, match="checkpoint_extension is safetensors, but weights that are divided among"):
        sharded.recipe(2).open(World(ProcessInfo("mpi", 0, 2), "cpu"))


def test_a_folder_of_files_for_processes_is_noted_once(tmp_path, world, capsys):
    run("semantic", tmp_path, world, QUIET, ("updates", 1), ("dist_file_subfolder", ""))
    assert "dist_file_subfolder" not in capsys.readouterr().out
    run("semantic", tmp_path, world, QUIET, ("updates", 2), ("dist_file_subfolder", "files/"))
    note = "Note: dist_file_subfolder is not used: processes do not find each other by a file."
    assert capsys.readouterr().out.splitlines().count(note) == 1


def test_a_missing_wandb_is_told_before_any_work(tmp_path, monkeypatch, capsys):
    """In the words of the file, and after the settings of a dry run."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = r"tracker wandb needs a package .* `pip install 'diff_dalle\[wandb\]'`, or remove wandb from wandb_project$"
    with pytest.raises(InputError, match=words):
        train(read("semantic", tmp_path, "nowhere", ("wandb_project", "p")).recipe(), ALONE)
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
            train(read(kind, tmp_path, "nowhere", *changes).recipe(), ALONE)
        assert str(found.value).startswith(f"{said}scripts/import_cascade.py --stage {command}"), kind
    assert capsys.readouterr().out == ""
    lora = read_lora(tmp_path, [*good_c, (generator, paths["stage_c"])])
    with pytest.raises(InputError, match=r"import_cascade.py --stage stage_c --model_version 3.6B\|1B --weights"):
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
    with pytest.raises(InputError, match="holds a run with other settings: .*; choose another experiment_id, or give"):
        run("semantic", tmp_path, world, QUIET, ("updates", 1), ("loop.seed", 7))
    monkeypatch.setattr(TrainLoop, "update", diverge)
    with pytest.raises(Diverged, match="so training has diverged: lower lr or raise warmup_updates. The last"):
        run("semantic", tmp_path / "bad", world, QUIET)


def diverge(loop, batch):
    for trainee in loop.trainees:
        trainee.consecutive_bad_steps = lambda: loop.config.max_bad_steps
    loop.step += 1
