"""Recordings of work: two updates of every kind of network and a picture by it, what is written, and what other
commands make of it; and the same of checkpoints of earlier versions, which go on and draw as they did.

Lines that begin with ``~`` hold numbers that may differ in the last digits between machines, and those with ``≈``
somewhat more, as far as rounding goes in the updates: see ``take.py``.
"""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from documented import Recording, flat
from others import Other
from workspace import CHECKPOINTS, GIVEN, Workspace

GIVEN_RUNS: dict[str, Any] = yaml.safe_load((GIVEN / "runs.yaml").read_text(encoding="utf-8"))
NAMES: dict[str, str] = {}
for _name, _text in GIVEN_RUNS["names"].items():
    NAMES[_name] = _text.format(**NAMES)
RUNS: dict[str, dict[str, Any]] = GIVEN_RUNS["runs"]


def training(name: str, more: bool = False) -> str:
    """The command of a run for two updates, or for more without anything else."""
    run = RUNS[name]
    usual = "--iterations 3" if "first" in run else "--updates 3 --preview_samples 0"
    flags = run.get("more", usual) if more else run.get("first", "")
    return f"{run['train']} {flags}".format(**NAMES).replace("NAME", name)


def drawing(name: str, folder: str) -> str:
    """The command that draws with the checkpoints of a run in ``folder``."""
    return RUNS[name]["draw"].format(**NAMES).replace("FOLDER", f"{folder}/{name}")


def numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def summary(pictures: np.ndarray, mark: str) -> str:
    """Means of the colors, of the quarters, and the deviation, of each picture; uint8 [N, H, W, 3]."""
    text = ""
    for i, picture in enumerate(pictures.astype(float)):
        halves = np.array_split(picture, 2)
        quarters = [part.mean() for half in halves for part in np.array_split(half, 2, axis=1)]
        text += f"{mark} picture {i}: {numbers([*picture.mean((0, 1)), *quarters, picture.std()])}\n"
    return text


def drawn(workspace: Workspace, line: str, mark: str = "~") -> str:
    """The pictures that a command of sample.py makes, and the files it writes."""
    shutil.rmtree(workspace.folder / "drawn", ignore_errors=True)
    workspace.need(line)
    (path,) = (workspace.folder / "drawn").glob("samples_*.npz")
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    files = sorted(path.name for path in (workspace.folder / "drawn").rglob("*") if path.is_file())
    kinds = [f"{name} {value.dtype} {list(value.shape)}" for name, value in sorted(arrays.items())]
    pictures = next(value for value in arrays.values() if value.ndim == 4)
    return f"writes {', '.join(files)}\n{path.name}: {'; '.join(kinds)}\n{summary(pictures, mark)}"


def measured(folder: Path) -> str:
    """The columns of a run's log, and the losses in it."""
    with (folder / "progress.csv").open() as file:
        text = f"columns {' '.join(sorted(next(csv.reader(file))))}\n"
    for line in (folder / "progress.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in sorted(row):
            if name.rpartition("/")[2] in ("loss", "grad_norm", "mse", "vb"):
                mark = "≈" if name.startswith("held_out") or name.endswith("grad_norm") else "~"
                text += f"{mark} step {row['step']} {name}: {numbers([row[name]])}\n"
    return text


def contents(path: Path) -> Iterator[str]:
    """What a checkpoint says about itself, and its tensors."""
    content = torch.load(path, weights_only=True)
    state, config = content.pop("state"), content.pop("config")
    content.pop("vocabulary", None)
    yield f"{path.name}: {json.dumps(content, sort_keys=True)}"
    if content["role"] == "optimizer":
        yield f"  state {' '.join(sorted(state))}"
        return
    weights = {name: value for name, value in state.items() if value.is_floating_point()}
    yield f"  {sum(value.numel() for value in weights.values())} numbers in {len(state)} tensors"
    if content["role"] == "model":
        yield f"~ {path.name} mean of the magnitudes: {numbers([_magnitude(weights)])}"
        yield from (f"  {name} {str(state[name].dtype)[6:]} {list(state[name].shape)}" for name in state)
        yield from (f"  config {name} = {value}" for name, value in sorted(flat(config)))


def _magnitude(state: Mapping[str, Any]) -> float:
    return float(torch.cat([value.flatten().float() for value in state.values()]).abs().mean())


def train(name: str, workspace: Workspace) -> set[str]:
    """Run two updates; the files that are written."""
    shutil.rmtree(workspace.folder / "runs" / name, ignore_errors=True)
    before = workspace.files()
    workspace.need(training(name))
    return workspace.files() - before


def record_run(name: str, workspace: Workspace) -> str:
    written, folder = train(name, workspace), workspace.folder / "runs" / name
    text = "".join(f"writes {file}\n" for file in sorted(written)) + measured(folder)
    run = json.loads((folder / "run.json").read_text())
    text += "".join(
        f"run.json {key} = {value}\n" for key, value in flat({**run, "config": {}, "best": {}, "lowest_loss": None})
    )
    for path in sorted(folder.glob("*.pt")):
        text += "".join(f"{line}\n" for line in contents(path))
    if not RUNS[name].get("exact"):
        text += drawn(workspace, drawing(name, "runs"), "≈")
    return text


def record_old(name: str, workspace: Workspace) -> str:
    """A run of an earlier version goes on, and its checkpoint draws."""
    folder = workspace.folder / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(workspace.folder / "old" / name, folder)
    workspace.need(training(name, more=True), plots=False)
    text = "".join(line for line in measured(folder).splitlines(True) if "step 3" in line)
    return text + drawn(workspace, drawing(name, "old"))


def record_others(workspace: Workspace) -> str:
    """Weights in the layouts of other projects become checkpoints of ours."""
    others = {
        "unconditional": Other(4, head_channels=4),
        "classes": Other(4, head_channels=4, classes=3),
        "noisy_classifier": Other(4, head_channels=4, pooled=3, final_size=4),
    }
    text, process = "", NAMES["PROCESS"]
    for name, other in others.items():
        torch.save(other.file, workspace.folder / f"{name}_theirs.pt")
        files = f"--model_path {name}_theirs.pt --out {name}.pt"
        workspace.need(f"convert.py {files} --image_size 8 --num_head_channels 4 {process}")
        text += "".join(f"{line}\n" for line in contents(workspace.folder / f"{name}.pt"))
    line = "{DRAW} {FEW} --labels 0,2 --model_path".format(**NAMES)
    text += drawn(workspace, f"{line} classes.pt")
    guided = "--classifier_path noisy_classifier.pt --classifier_scale 2"
    return text + drawn(workspace, f"{line} unconditional.pt {guided}")


def make_checkpoint(name: str, workspace: Workspace) -> None:
    """Keep a run, which its files are packed into, for versions to come."""
    train(name, workspace)
    folder = workspace.folder / "runs" / name
    with tarfile.open(CHECKPOINTS / f"{name}.tar.xz", "w:xz") as tar:
        for path in sorted(folder.iterdir()):
            if path.suffix not in (".png", ".lock") and path.is_file():
                tar.add(path, f"{name}/{path.name}", filter=_anonymous)
    workspace.unpack(CHECKPOINTS / f"{name}.tar.xz")


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname, info.gname, info.mode = "", "", 0o644
    return info


def recordings() -> dict[str, Recording]:
    new = {f"runs/{name}.txt": partial(record_run, name) for name in RUNS}
    old = {f"old/{name}.txt": partial(record_old, name) for name in RUNS}
    return {**new, "runs/others.txt": record_others, **old}
