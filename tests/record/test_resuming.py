"""A run that is cut in two is the same run, bit for bit: optimizers, averages, discriminators, revivals, adaptive
weights, both U-Nets of a decoder, random masks and buckets included."""

import hashlib
import re
import shutil

import pytest
from script_running import losses
from tiny_runs import RUNS, training
from workspace import Workspace

from diff_dalle.checkpoints.checkpoint import load_file

BUCKETS = "--multi_aspect_ratio 1/1,1/2 --bucket_factor 8 --bucketeer_random_ratio 0.5"
OFTEN = f"{BUCKETS} --ema_start_iters 1 --ema_iters 2 --ema_beta 0.5"
REVIVED = [("revival_interval", 1), ("revival_usage", 0.99)]
CASES = {
    **dict.fromkeys(RUNS, ""),
    "stage_a": " ".join([OFTEN, *(f"--set autoencoding.{name}={value}" for name, value in REVIVED)]),
    "semantic": OFTEN,
    "stage_b": OFTEN,
    "stage_c": f"{OFTEN} --adaptive_loss_weight True",
    "controlnet": "--controlnet_filter inpaint",
    "stage_c_controlnet": """--controlnet_filter InpaintFilter --controlnet_filter_params '{"p_outpaint": 0.4}'""",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("resuming"))


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_cut_in_two_is_the_same_run(workspace, name):
    folder = workspace.folder / "runs" / name

    def files(*lines: str) -> dict[str, str]:
        """The last step's, by what they hold."""
        shutil.rmtree(folder, ignore_errors=True)
        for i, line in enumerate(lines):
            line = line.replace("--controlnet_filter canny", "")
            assert ("Resuming at step 2" in workspace.need(f"{line} {CASES[name]}", plots=False).out) == bool(i)
        step = max(re.findall(r"model(\d{6})", " ".join(path.name for path in folder.iterdir())))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(f"*{step}.*")}

    whole = files(training(name, more=True)), losses(folder)
    assert len(whole[0]) > 1 and (files(training(name), training(name, more=True)), losses(folder)) == whole
    if name == "stage_a":
        state = load_file(str(folder / "opt000003.pt"), ("optimizer",))["state"]
        assert state["task"]["updates"] == 3 and list(state["modules"]) == ["discriminator"]
    elif name in ("stage_b", "stage_c"):
        state = load_file(str(folder / "opt000003.pt"), ("optimizer",))["state"]
        assert (state["task"]["adaptive_weight"] != 1).any()
