"""Parts in modules outside the checkout: documented ones, in training, resuming, sampling, and in two processes."""

import re
import sys

import numpy as np
import pytest
from checkpoint_making import make_file
from control_making import train_controlnet
from document_reading import write_modules
from forking import run_ranks
from module_making import importable
from script_running import ROOT, environment, hashes, losses, run, train

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.commands.sources import import_parts
from diff_dalle.config import InputError
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

DOCUMENT = (ROOT / "diff_dalle" / "README.md").read_text(encoding="utf-8")
MORE = '''
from PIL import Image

from diff_dalle import FILTERS, TASKS, WORLDS
from diff_dalle.config import option, settings
from diff_dalle.images.control_filters.contract import ControlFilter
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.worlds.contract import RenderedWorld, Shown


@TASKS.register
class Halved(DenoisingTask):
    def losses(self, batch, draw):
        found = super().losses(batch, draw)
        return {**found, "loss": found["loss"] / 2}


@FILTERS.register
class Brightness(ControlFilter):
    channels = 1

    def __call__(self, pictures, draw, masks=None):
        return pictures.mean(1, keepdim=True)


@settings
class DotsConfig:
    """Dots"""

    samples: int = option(8, "number of samples", least=1)


@WORLDS.register
class Dots(RenderedWorld):
    name, title, config_class = "dots", "a world of dots", DotsConfig

    def splits(self):
        return {"train": range(self.config.samples)}

    def show(self, split, item):
        return Shown(f"{item:04d}", Image.new("RGB", (16, 16), (item * 8, 0, 0)), f"dot {item}", {"level": item})
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(ShapesConfig(image_size=16, train_samples=24, val_samples=8, samples_per_shard=8), str(folder))
    return folder / "train"


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """The present one, with the modules."""
    folder = tmp_path_factory.mktemp("own")
    write_modules(DOCUMENT, folder)
    (folder / "more_parts.py").write_text(MORE)
    with pytest.MonkeyPatch.context() as patch, importable(folder):
        patch.chdir(folder)
        sys.path.remove(str(folder))  # where --import is to put it
        yield folder


CONTROL = {"task": "more_parts.Halved", "import": "more_parts"}
LOSS = {"import": "my_loss", "loss_type": "my_loss.pseudo_huber", "iterations": 4, "batch_size": 4, "save_interval": 2}


@pytest.fixture(scope="module")
def trained(folder, data):
    train(folder / "run", data, **LOSS)
    return folder / "run"


def test_the_documented_parts_are_short(folder):
    """15 lines for a loss function in the loop, 10 for a sampler."""
    assert len((folder / "my_loss.py").read_text().splitlines()) <= 15
    assert len((folder / "my_sampler.py").read_text().splitlines()) <= 10


def test_a_loss_is_what_is_minimized(trained, data, tmp_path):
    train(tmp_path, data, iterations=2, batch_size=4)
    own, usual = losses(trained), losses(tmp_path)
    assert own == losses(trained, "error") and not losses(trained, "mse")
    assert 0.7 < own[1] / usual[1] ** 0.5 < 0.9  # the mean size of normal errors is 0.8 of their root mean square


def test_a_flow_has_it_too(data, tmp_path):
    train(tmp_path, data, **{**LOSS, "iterations": 1, "noise_schedule": "flow", "diffusion_steps": None})
    assert losses(tmp_path) == losses(tmp_path, "error") and len(losses(tmp_path)) == 1


def test_a_run_with_it_resumes_bit_for_bit(trained, data, tmp_path):
    for iterations in (2, 4):
        train(tmp_path, data, **{**LOSS, "iterations": iterations})
    whole, cut = hashes(trained), hashes(tmp_path)
    last = [name for name in whole if name.endswith("000004.pt")]
    assert len(last) == 3 and all(whole[name] == cut[name] for name in last)


@pytest.mark.slow
def test_two_processes_have_it(trained, data, tmp_path):
    train(tmp_path, data, ranks=2, **{**LOSS, "batch_size": 2})
    one, two = losses(trained), losses(tmp_path)
    assert one.keys() == two.keys() and all(one[step] == pytest.approx(two[step], abs=1e-5) for step in one)


def test_a_checkpoint_names_the_module_that_it_needs(trained, tmp_path):
    path = trained / "model000004.pt"
    assert load_file(str(path))["config"]["diffusion"]["loss_type"] == "my_loss.pseudo_huber"
    lost = run_ranks(["-c", f"import diff_dalle; diff_dalle.load({str(path)!r}, 'cpu')"], environment(), 1)
    assert "but my_loss is not imported: start with --import my_loss, or import it in Python" in lost.stderr
    sampling = "--model_path", path, "--steps", 2, "--prompts", "a", "--logdir", tmp_path / "out"
    refused = run("sample.py", *sampling, ok=False, process=True)
    assert refused.returncode == 2 and "my_loss is not imported: start with --import my_loss" in refused.stderr
    run("sample.py", *sampling, "--import", "my_loss", process=True)


def test_a_sampler_is_chosen_like_others(tmp_path):
    common = "--model_path", make_file(tmp_path), "--steps", "3", "--prompts", "red heart"
    made = {}
    for name, flags in {
        "own": ["--import", "my_sampler", "--sampler", "my_sampler.euler"],
        "ddim": ["--sampler", "ddim"],
        "usual": ["--sampler", "unipc"],
    }.items():
        run("sample.py", *common, *flags, "--logdir", tmp_path / name)
        made[name] = np.load(next((tmp_path / name).glob("*.npz")))["arr_0"].astype(int)
    assert np.abs(made["own"] - made["ddim"]).max() <= 2 < np.abs(made["own"] - made["usual"]).max()


def test_a_task_trains_in_the_place_of_the_usual_one(data, tmp_path):
    for name, task in (("own", "more_parts.Halved"), ("usual", None)):
        train(tmp_path / name, data, iterations=1, batch_size=4, task=task, **{"import": "more_parts"})
    assert losses(tmp_path / "own")[1] == pytest.approx(losses(tmp_path / "usual")[1] / 2, rel=1e-4)
    pipeline = diff_dalle.load(str(tmp_path / "own" / "model000001.pt"), "cpu")  # whose task is not needed
    assert pipeline.step == 1
    own = {"task": "more_parts.Halved", "ok": False}
    lost = train(tmp_path / "own", data, process=True, **own)
    assert (
        "--task is 'more_parts.Halved', but more_parts is not imported: start with --import more_parts" in lost.stderr
    )
    own["import"] = "more_parts"
    wrong = {
        "Upsampling": train(tmp_path / "wrong", data, small_size=8, **own),
        "Contrastive": train(tmp_path / "wrong", data, script="train_classifier.py", batch_size=4, **own),
        "ControlledDenoising": train_controlnet(make_file(tmp_path), data, tmp_path / "wrong", _ok=False, **CONTROL),
    }
    for usual, result in wrong.items():
        assert f"--task is 'more_parts.Halved', but must be based on {usual}Task, which trains this" in result.stderr


def test_a_filter_makes_controls(data, tmp_path):
    base = make_file(tmp_path)
    own = {"controlnet_filter": "more_parts.Brightness", "controlnet_filter_params": "{}", "import": "more_parts"}
    train_controlnet(base, data, tmp_path / "run", **own)
    control = load_file(str(tmp_path / "run" / "model000002.pt"))["config"]["control"]
    assert control["controlnet_filter"] == "more_parts.Brightness" and control["control_channels"] == 1


def test_a_world_has_a_command(tmp_path):
    dots = "more_parts.Dots", "--import", "more_parts"
    out = run("prepare_data.py", *dots, "--out_dir", tmp_path / "d", "--samples", 6)
    assert out.stdout.strip() == f"{tmp_path / 'd'}/train: 6 samples in 1 shard"
    wrong = run("prepare_data.py", *dots, "--samples", 0, ok=False)
    assert "--samples is 0, but must be at least 1" in wrong.stderr
    helped = run("prepare_data.py", *dots, "--help").stdout
    assert "Render a world of dots into shards." in helped and "number of samples [integer; default 8]" in helped


def test_a_world_that_is_not_imported_is_named(tmp_path):
    out = run("prepare_data.py", "more_parts.Dots", "--out_dir", tmp_path / "d", ok=False, process=True)
    assert "the world 'more_parts.Dots' is not there: more_parts is not imported: start with --import" in out.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent", None, "--import absent: there is no such module in "),
        (
            "./parts.py",
            None,
            "--import is './parts.py', but must be a module's name, such as my_parts for ./my_par",
        ),
        ("lacking", "import no_such_package", "--import lacking: it requires the package no_such_package"),
        (
            "broken",
            "x = 1\ny = undefined",
            r"--import broken: NameError: name 'undefined' .* \(.*broken.py, line 2",
        ),
        ("wrong", "def f(:", r"--import wrong: SyntaxError: .* \(.*line 1\)"),
        ("twice", None, "--import twice: twice.f is in diff_dalle.samplers already: give yours another name"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told(folder, name, text, message):
    twice = "from diff_dalle import SAMPLERS\n" + 2 * "@SAMPLERS.register\ndef f(process, denoise, x, noise): ...\n"
    (folder / f"{name.strip('./')}.py").write_text(text or twice) if text or name == "twice" else None
    with pytest.raises(InputError, match=message if "\\" in message else re.escape(message)):
        import_parts(["--sampler", "ddim", "--import", name])


def test_nothing_here_takes_the_place_of_a_package(folder):
    (folder / "json.py").write_text("raise SystemExit('imported')")
    import_parts(["--import=my_loss"])
    assert sys.path[-1] == str(folder) and "my_loss" in sys.modules
    assert diff_dalle.LOSSES["my_loss.pseudo_huber"] is sys.modules["my_loss"].pseudo_huber
