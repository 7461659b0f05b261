"""Recordings of what is said about mistakes, with the exit status: one entry for each of ``given/mistakes.yaml``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import yaml
from documented import Recording
from tiny_runs import NAMES
from workspace import GIVEN, Result, Workspace

import diff_dalle

MISTAKES: dict[str, dict[str, Any]] = yaml.safe_load((GIVEN / "mistakes.yaml").read_text(encoding="utf-8"))


def of_command(workspace: Workspace, line: str) -> Result:
    return workspace.run(line)


def of_preset(workspace: Workspace, text: str) -> Result:
    (workspace.folder / "mistake.yaml").write_text(text, encoding="utf-8")
    return workspace.run("train_generator.py --config mistake.yaml --dry_run True")


def of_file(name: str, command: str, workspace: Workspace, changes: dict[str, Any]) -> Result:
    """Changes of one of the given files, by the paths of settings; "(run)" begins the training too."""
    changes = dict(changes)
    end = "" if changes.pop("(run)", False) else " --dry_run True"
    file = changed(yaml.safe_load((workspace.folder / name).read_text(encoding="utf-8")), changes)
    text = json.dumps(file, indent=2) if name.endswith(".json") else yaml.safe_dump(file, sort_keys=False)
    (workspace.folder / f"mistake_{name}").write_text(text, encoding="utf-8")
    return workspace.run(f"{command} mistake_{name}{end}")


def changed(file: dict, changes: dict[str, Any]) -> dict:
    file = copy.deepcopy(file)
    for path, value in changes.items():
        *sections, key = path.split(".")
        node: Any = file
        for section in sections:
            node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
        if value == "(left out)":
            del node[key]
        else:
            node[key] = value
    return file


def of_call(workspace: Workspace, expression: str) -> Result:
    with workspace.inside():
        names = {"dd": diff_dalle, "np": np, "few": {"sampler": diff_dalle.SamplerConfig(steps=4)}}
        if "pipeline." in expression:
            names["pipeline"] = diff_dalle.load(NAMES["GENERATOR"], "cpu", "fp32")
        try:
            return Result(0, "", f"(no error: {type(eval(expression, names)).__name__})")
        except Exception as error:
            return Result(1, "", workspace.plain(f"{type(error).__name__}: {error}"))


def make_wrong_checkpoints(workspace: Workspace) -> None:
    folder = workspace.folder
    whole = (folder / NAMES["GENERATOR"]).read_bytes()
    content = torch.load(folder / NAMES["GENERATOR"], weights_only=True)
    first = next(iter(content["state"]))
    state = content["state"]
    model = content["config"]["model"]
    other = {
        "bundle": {"bundle": 1, "files": {}},
        "tensor": torch.zeros(3),
        "foreign": {"state_dict": {"a.weight": torch.zeros(3)}},
        "newer": {**content, "format": 99},
        "kind": {**content, "kind": "generater"},
        "no_settings": {**content, "config": {}},
        "setting": {**content, "config": {**content["config"], "model": {**model, "unett": {}}}},
        "setting_type": {**content, "config": {**content["config"], "model": {**model, "image_channels": "x"}}},
        "tensor_missing": {**content, "state": {name: value for name, value in state.items() if name != first}},
        "tensor_shape": {**content, "state": {**state, first: torch.zeros(2, 2)}},
        "no_vocabulary": {name: value for name, value in content.items() if name != "vocabulary"},
    }
    other["no_vocabulary"]["config"] = {**content["config"], "tokenizer": {"bpe_path": "gone.txt"}}
    for name, value in other.items():
        torch.save(value, folder / f"{name}.pt")
    for name, data in (("empty.pt", b""), ("text.pt", b"text"), ("text.safetensors", b"text")):
        (folder / name).write_bytes(data)
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])


WAYS: dict[str, Callable[[Workspace, Any], Result]] = {
    "flags": of_command,
    "presets": of_preset,
    "decoder": partial(of_file, "decoder.json", "train_decoder.py --config_file"),
    **{
        name: partial(of_file, f"{name}.yaml", "train_cascade.py")
        for name in ("stage_a", "stage_b", "stage_c", "stage_c_controlnet")
    },
    "requests": of_command,
    "files": of_command,
    "python": of_call,
}


def record(dialect: str, workspace: Workspace) -> str:
    if dialect in ("files", "requests"):
        make_wrong_checkpoints(workspace)
    text = ""
    for name, given in MISTAKES[dialect].items():
        if dialect in ("flags", "requests", "files", "python"):
            given = given.format(**NAMES)
        result = WAYS[dialect](workspace, given)
        shown = json.dumps(given) if isinstance(given, dict) or "\n" in given else given
        indented = "\n  ".join(result.message.splitlines())
        text += f"{name}\n  given: {shown}\n  status: {result.status}\n  {indented}\n\n"
    return text


def recordings() -> dict[str, Recording]:
    return {f"mistakes/{dialect}.txt": partial(record, dialect) for dialect in MISTAKES}
