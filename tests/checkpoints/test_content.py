"""Damaged, foreign and hostile checkpoint files: one sentence each, in bounded memory."""

import copy
import pickle
import re
import struct
import sys
import zipfile

import pytest
import torch
from checkpoint_making import make_file, make_run
from refusing import damaged, refused

from diff_dalle.checkpoints import content as checks
from diff_dalle.checkpoints.checkpoint import Identity, load_file, save_file
from diff_dalle.checkpoints.content import MAX_COUNT, MAX_VALUES, DamagedError, check_like, leaves_of
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE

HEADER = {"format": 1, "role": "model", "kind": "toy", "step": 4, "samples": 32, "tokenizer": None, "config": {}}


def write(path, **changed):
    content = {**HEADER, "state": {"weight": torch.ones(2, 3)}, **changed}
    torch.save({name: value for name, value in content.items() if value is not ...}, path)
    return str(path)


def test_a_plain_file_is_read(tmp_path):
    content = load_file(write(tmp_path / "a.pt"))
    assert content["trainee"] == content["vocabulary"] == "" and content["step"] == 4
    assert torch.equal(content["state"]["weight"], torch.ones(2, 3))


def shared_config():
    config = ["x"] * 10
    for _ in range(9):
        config = [config] * 10
    return {"a": config}


def cycle():
    config = {}
    config["a"] = config
    return config


WRONG = [
    ({"step": "x"}, "its step is 'x', but must be a whole number"),
    ({"step": float("nan")}, "its step is nan"),
    ({"step": torch.tensor(3)}, "its step is a torch.int64 tensor of shape ()"),
    ({"step": -1}, "its step is -1"),
    ({"samples": 10**500}, "its samples is a number of 2^63 or more"),
    ({"format": True}, "its format is True"),
    ({"format": "1"}, "its format is '1'"),
    ({"format": 9}, "format 9, newer than this version reads"),
    ({"role": ["model"]}, "its role is a list"),
    ({"role": "x"}, "holds 'x', but a model's weights"),
    ({"kind": 3}, "its kind is 3"),
    ({"kind": ...}, "was not written by diff_dalle"),
    ({"config": ...}, "was not written by diff_dalle"),
    ({"trainee": None}, "its trainee is None"),
    ({"tokenizer": 7}, "its tokenizer is 7"),
    ({"vocabulary": ["a"]}, "its vocabulary is a list"),
    ({"config": [1]}, "its config must be a mapping"),
    ({"config": {"a": torch.ones(1)}}, "its config must be a mapping of settings with plain values"),
    ({"config": {"a": 2**70}}, "its config must be a mapping of settings with plain values"),
    ({"config": shared_config()}, f"its config holds more than {MAX_VALUES:,} values"),
    ({"config": cycle()}, "32 levels"),
    ({"state": 3}, "its state is 3, but must be a mapping"),
    ({"state": {"weight": 3}}, "its weight 'weight' is 3, but must be a tensor"),
    ({"state": {7: torch.ones(1)}}, "its weight 7 is a torch.float32 tensor"),
    ({"state": {"w": torch.ones(1).expand(10**6, 10**6)}}, "state holds a torch.float32 tensor of shape"),
    ({"state": {"w": torch.ones(2, 2).to_sparse()}}, "no tensor of plain values"),
    ({"state": dict.fromkeys(map(str, range(99)), torch.ones(10**4))}, "its tensors would need 3,960,000"),
    ({"state": {"w": bytearray(9)}}, "state holds a bytearray"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_wrong_entries_are_one_sentence(tmp_path, changed, words):
    with pytest.raises(InputError) as error:
        load_file(write(tmp_path / "a.pt", **changed))
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("content", [[], 3, "x", None, {"a": 1}])
def test_other_contents_are_foreign(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with damaged("was not written by diff_dalle"):
        load_file(str(tmp_path / "a.pt"))


def rewritten(path, change):
    """The archive with every entry passed through ``change(name, data)`` → (data, compression)."""
    with zipfile.ZipFile(path) as old:
        entries = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data in entries:
            data, compression = change(name, data)
            new.writestr(name, data, compression)


@pytest.mark.parametrize("zeros", [0, 10**7])
def test_compressed_archives_are_refused(tmp_path, zeros):
    """A bomb of zeros would be unpacked before anything else is known about it."""
    path = write(tmp_path / "a.pt")
    rewritten(path, lambda name, data: (data + bytes(zeros) * name.endswith("0"), zipfile.ZIP_DEFLATED))
    with damaged("truncated or is not a PyTorch file"):
        load_file(path)


def test_entries_that_claim_petabytes_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write(path)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")  # the last entry of the directory
    data[at + 20 : at + 28] = struct.pack("<II", 0xFFFFFF00, 0xFFFFFF00)
    path.write_bytes(data)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the archive was opened"))
    with damaged("truncated or is not a PyTorch file"):
        load_file(str(path))


def test_a_long_pickle_is_refused(tmp_path):
    path = write(tmp_path / "a.pt", config={"a": "x" * (17 * 2**20)})
    with damaged("beside its tensors, more than 16,777,216"):
        load_file(path)


def test_code_is_never_run(tmp_path):
    class Bad:
        def __reduce__(self):
            return sys.exit, (3,)

    path, content = write(tmp_path / "a.pt"), {**HEADER, "state": Bad()}
    evil = pickle.dumps(content, protocol=2)
    rewritten(path, lambda name, data: (evil if name.endswith("data.pkl") else data, zipfile.ZIP_STORED))
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for each in (path, str(tmp_path / "old.pt")):
        with damaged("truncated or is not a PyTorch file"):
            load_file(each)


def test_files_of_torch_before_its_archives_are_read(tmp_path, monkeypatch):
    """Truncated ones are not, nor those with much beside their tensors."""
    path, state = tmp_path / "old.pt", {"a": torch.arange(2000.0), "b": torch.ones(3, 4, dtype=torch.float16)}
    torch.save({**HEADER, "state": state}, path, _use_new_zipfile_serialization=False)
    found = load_file(str(path), values=True)["state"]
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 397):
        path.write_bytes(whole[:cut])
        with pytest.raises(DamagedError):
            load_file(str(path))
    path.write_bytes(whole)
    monkeypatch.setattr(checks, "MAX_PICKLE", 500)
    with damaged("truncated, or holds more than 500 bytes beside its tensors"):
        load_file(str(path))


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "a.pt"
    whole = (path, write(path))[0].read_bytes()
    for cut in range(0, len(whole), 23):
        path.write_bytes(whole[:cut])
        with pytest.raises(DamagedError):
            load_file(str(path))


def test_nothing_is_repeated_in_a_long_walk():
    assert list(leaves_of({"a": [1, {"b": None}]}, "F", "config")) == [1, None]
    with damaged("has the key a tuple"):
        list(leaves_of({(1, 2): 3}, "F", "config"))


# -------------------------------------------------------------------------------------------------- absurd networks


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("generator"))


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("unet", "num_channels", 10**9, "holds impossible settings"),
        ("unet", "num_channels", 2**31, "does not fit this model|impossible settings"),
        ("unet", "num_res_blocks", 200, "they describe many more weights than the"),
        ("text", "enc_depth", 10**9, "enc_depth is 1000000000, but must be at least 1 and at most 256"),
        ("text", "enc_depth", 200, "they describe many more weights than the"),
        ("text", "text_length", 10**9, "does not fit this model: it has text_encoder"),
        ("unet", "image_size", 10**9, "image_size is 1000000000, but must be at least 1 and at most 16,384"),
        ("unet", "channel_mult", [], "does not fit this model"),
        ("unet", "num_heads", "x", "num_heads is 'x', but must be an integer"),
        ("unet", "num_classes", MAX_COUNT, "impossible settings|does not fit"),
        ("", "diffusion_steps", 10**5 + 1, "diffusion_steps is 100001, but must be at least 1 and at most 100,000"),
        ("", "diffusion_steps", 10**12, "diffusion_steps is 1000000000000, but must be"),
    ],
)
def test_absurd_settings_are_refused_before_memory_is_needed(generator, tmp_path, section, name, value, words):
    content = torch.load(generator, weights_only=True)
    config = content["config"]
    (config["model"][section] if section else config["diffusion"])[name] = value
    torch.save(content, tmp_path / "a.pt")
    with refused(words):
        open_network(str(tmp_path / "a.pt"), "generator")


def test_a_check_of_settings_leaves_other_builds_alone(generator):
    open_network(generator, "generator")
    assert len(make_run().recipe().open(ALONE).network().state_dict()) > 10


# ---------------------------------------------------------------------------------------------- an optimizer's state


def trained_optimizer():
    parameter, scale = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([{"params": [parameter]}, {"params": [scale], "weight_decay": 0.0}])
    (parameter.sum() * scale).neg().backward()
    optimizer.step()
    return optimizer


def test_a_wrong_state_of_an_optimizer_is_one_sentence():
    optimizer = trained_optimizer()
    groups, number = "param_groups must hold 1 + 1 parameters", "step must be one number that is finite"
    some = "opt.state must hold the state of some of the 2 parameters"
    for path, value, words in (
        (["param_groups"], [], groups),
        (["param_groups", 0, "params"], [0, 5], groups),
        (["param_groups", 0, "params"], ["a"], groups),
        (["param_groups", 0, "params"], [7], "must number the parameters from 0 on"),
        (["state"], 3, some),
        (["state", 9], {}, some),
        (["state", 0], 3, "opt.state[0] is 3"),
        (["state", 0, "exp_avg"], torch.ones(3, 2), "tensor of shape (2, 3)"),
        (["state", 0, "exp_avg"], "x", "exp_avg is 'x', but must be"),
        *(
            (["state", 0, "step"], value, number)
            for value in (torch.tensor(torch.nan), -torch.ones(()), torch.ones(2, 3))
        ),
    ):
        state = node = copy.deepcopy(optimizer.state_dict())
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        with refused(re.escape(words)):
            check_like(optimizer, state, "opt")
    with refused(re.escape(f"opt.{groups}")):
        check_like(optimizer, 3, "opt")


def test_the_state_of_an_optimizer_fits_itself_and_a_new_one():
    """The average of a single number may be negative; a new optimizer has no state yet."""
    optimizer = trained_optimizer()
    state = optimizer.state_dict()
    assert state["state"][1]["exp_avg"] < 0
    check_like(optimizer, state, "opt")
    fresh = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(2, 3))]}, {"params": [torch.ones(())]}])
    check_like(fresh, state, "opt")


OWN = {"scale": torch.ones(()), "parts": {"a": [1, 2.0]}, "name": "x"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({**OWN, "scale": torch.ones(1)}, "s.scale is a torch.float32 tensor of shape \\(1,\\), but must be"),
        ({**OWN, "scale": torch.ones((), dtype=torch.int64)}, "s.scale is a torch.int64"),
        ({**OWN, "scale": 1.0}, "s.scale is 1.0, but must be a torch.float32"),
        ({**OWN, "more": 1}, "s is a dict, but must have scale, parts, name"),
        ({**OWN, "parts": {"a": [1]}}, "s.parts.a is a list, but must have 2 entries"),
        ({**OWN, "parts": {"a": [1, "x"]}}, r"s.parts.a\[1\] is 'x', but must be a float"),
        ([], "s is a list, but must have scale"),
    ],
)
def test_states_of_another_structure_are_refused(given, words):
    check_like(OWN, dict(OWN), "s")
    with refused(words):
        check_like(OWN, given, "s")


def test_the_vocabulary_is_in_files_with_weights_only(tmp_path):
    identity = Identity("toy", {}, "bpe", "#\na b\n")
    for role, expected in (("model", "#\na b\n"), ("ema_0.9", "#\na b\n"), ("optimizer", "")):
        save_file(str(tmp_path / "a.pt"), role, identity, 1, 2, {})
        assert load_file(str(tmp_path / "a.pt"), ("model", "ema", "optimizer"))["vocabulary"] == expected
