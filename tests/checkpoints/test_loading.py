"""Which vocabulary a checkpoint is opened with, and that nothing it names is run or fetched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_making import make_file, make_run, save_model
from file_server import serving
from refusing import refused

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.safetensors import write_weights_file
from diff_dalle.config import InputError
from diff_dalle.text.tokenizer import load_tokenizer
from diff_dalle.text.vocabulary import write_merge_file

MERGES = [("r", "e"), ("re", "d</w>")]


def edited(path, bpe_path=None, **changed):
    """A checkpoint with other entries; a value of None removes one."""
    content = {**torch.load(path, weights_only=True), **changed}
    if bpe_path is not None:
        content["config"]["tokenizer"]["bpe_path"] = bpe_path
    torch.save({name: value for name, value in content.items() if value is not None}, path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints trained with a vocabulary of two merges, and with the built-in one."""
    folder = tmp_path_factory.mktemp("made")
    write_merge_file(str(folder / "merges.txt"), "#version: mine", MERGES)
    return save_model(make_run(bpe_path=folder / "merges.txt"), folder / "own.pt", 0.0, 0.2), make_file(folder)


@pytest.fixture
def custom(made, tmp_path):
    """The first of them, and its merge file."""
    merges = tmp_path / "merges.txt"
    write_merge_file(str(merges), "#version: mine", MERGES)
    path = shutil.copy(made[0], tmp_path / "ema.pt")
    return edited(str(path), str(merges)), merges


def test_a_checkpoint_needs_no_merge_file(custom):
    path, merges = custom
    own = load_tokenizer(str(merges))
    merges.unlink()
    found = open_network(path, "generator").tokenizer
    assert found.identity == own.identity and found.encode("red") == own.encode("red")


def test_the_built_in_vocabulary_is_not_stored(made):
    path = made[1]
    assert "vocabulary" not in torch.load(path, weights_only=True)
    assert open_network(path, "generator").tokenizer.identity == load_tokenizer().identity


def test_an_earlier_checkpoint_finds_its_regular_local_merge_file(custom):
    path, merges = custom
    edited(path, vocabulary=None)
    assert open_network(path, "generator").tokenizer.vocabulary.merges == tuple(MERGES)
    moved = merges.rename(merges.with_name("moved.txt"))
    with refused(r"merges\.txt'.*which is no local file.*bpe_path"):
        open_network(path, "generator")
    assert open_network(path, "generator", str(moved)).tokenizer.vocabulary.merges == tuple(MERGES)


@pytest.mark.parametrize("stored", [True, False])
def test_no_command_of_a_checkpoint_is_run(custom, tmp_path, stored):
    """Neither with a vocabulary in the file nor, as in earlier versions, without."""
    path, _ = custom
    command = f"pipe:touch {tmp_path}/run; cat {tmp_path}/merges.txt"
    edited(path, command, **({} if stored else {"vocabulary": None}))
    if stored:
        assert open_network(path, "generator").tokenizer.vocabulary.merges == tuple(MERGES)
    else:
        with refused("no local file: give its merge file by bpe_path"):
            open_network(path, "generator")
    assert not (tmp_path / "run").exists()
    assert open_network(path, "generator", command).tokenizer and (tmp_path / "run").exists()  # the user's own words


def test_nothing_but_a_regular_file_is_opened(custom, tmp_path):
    os.mkfifo(tmp_path / "FIFO")
    (tmp_path / "FOLDER").mkdir()
    remote = ("http://127.0.0.1:9/merges.txt", "s3://bucket/merges.txt")
    for place in (*remote, str(tmp_path / "FIFO"), str(tmp_path / "FOLDER")):
        with refused("no local file: give its merge file by bpe_path"):
            open_network(edited(custom[0], place, vocabulary=None), "generator")


def test_a_secret_in_a_checkpoint_is_not_shown(custom):
    path = edited(custom[0], "https://user:pa55word@host/merges.txt?sig=abcdef", vocabulary=None)
    with pytest.raises(InputError) as error:
        open_network(path, "generator")
    assert "pa55word" not in str(error.value) and "abcdef" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no header", "the vocabulary in .* is not a merge file"),
        ("#\na b c\n", "the vocabulary in .* line 2 is 'a b c'"),
        ("#\na b\n", "but the vocabulary in the file is bpe-515:.*bpe_path"),
    ],
)
def test_a_damaged_vocabulary_is_named(custom, text, words):
    path, _ = custom
    with refused(words):
        open_network(edited(path, vocabulary=text), "generator")


def test_a_remote_checkpoint_is_downloaded_once(made):
    data = Path(made[1]).read_bytes()
    local = open_network(made[1], "generator").load(torch.device("cpu")).state_dict()
    with serving() as server:
        server.files["/ema.pt"] = data
        saved = open_network(server.url("/ema.pt"), "generator")
        weights, loaded = saved.weights(), saved.load(torch.device("cpu")).state_dict()
    assert len(data) <= server.sent < 1.1 * len(data)
    for name, value in local.items():
        assert torch.equal(weights[name], value) and torch.equal(loaded[name], value)


def test_remote_weights_alone_do_not_stay_in_memory(made, tmp_path):
    export = tmp_path / "ema.safetensors"
    with export.open("wb") as file:
        write_weights_file(file, load_file(made[1]), made[1], torch.float32)
    with serving() as server:
        server.files["/ema.safetensors"] = export.read_bytes()
        saved = open_network(server.url("/ema.safetensors"), "generator")
        loaded = saved.load(torch.device("cpu")).state_dict()
    assert saved.copy is None
    for name, value in load_file(made[1])["state"].items():
        assert torch.equal(loaded[name], value)


def test_a_damaged_remote_checkpoint_is_refused_when_it_is_opened(made):
    data = bytearray(Path(made[1]).read_bytes())
    data[len(data) // 2] ^= 1
    with serving() as server, refused("checksum"):
        server.files["/ema.pt"] = bytes(data)
        open_network(server.url("/ema.pt"), "generator")


def test_a_checkpoint_is_loaded_without_the_compiler_of_torch(made):
    """Which random numbers and copies on the meta device import: a second, and 60 MB."""
    code = (
        "import sys, torch\n"
        "from diff_dalle.checkpoints.loading import open_network\n"
        "open_network(sys.argv[1], 'generator').load(torch.device('cpu'))\n"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, made[1]]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
