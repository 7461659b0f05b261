import logging
import os
import socket
import sys

import pytest
from refusing import refused

from diff_dalle import storage
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.sources import find_shards

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    os.chdir(path.parent)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)


def make_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(("make", "kind"), [(make_fifo, "FIFO"), (make_socket, "socket"), (make_device, "device")])
def test_what_may_block_or_never_end_is_refused(tmp_path, monkeypatch, make, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.tar"
    make(path)
    (shard,) = find_shards([str(tmp_path)])
    files = ShardFiles(str(tmp_path))
    for use in (
        storage.size_and_tag,
        storage.read_bytes,
        storage.open_read,
        storage.open_regular,
        files.examine,
    ):
        with refused(rf"x\.tar is a {kind}, not a file"):
            use(shard)


def test_the_output_of_a_command_may_stand_for_a_file(tmp_path):
    """A shell's <(command) is a path to a FIFO below /dev/fd."""
    end, other = os.pipe()
    os.write(other, b"lr: 1")
    os.close(other)
    assert storage.read_text(f"/dev/fd/{end}") == "lr: 1"
    os.close(end)


def test_a_folder_that_cannot_be_read_is_left_out_and_named(tmp_path, monkeypatch, caplog):
    for name in ("a.tar", "lost+found/b.tar", "z/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    scandir = os.scandir

    def refuse(path):  # root may read all
        if os.fspath(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with caplog.at_level(logging.WARNING):
        assert find_shards([str(tmp_path)]) == [str(tmp_path / "a.tar"), str(tmp_path / "z" / "c.tar")]
        assert storage.list_files(str(tmp_path)) == [str(tmp_path / "a.tar")]
    assert caplog.text.count("lost+found cannot be listed and is left out") == 1
    with refused(r"lost\+found cannot be read or written: permission denied"):
        storage.list_files(str(tmp_path / "lost+found"))


def test_a_local_file_that_changed_is_noticed(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    state = storage.size_and_tag(str(path))
    assert storage.read_bytes(str(path), 2, 3, state) == b"234"
    os.utime(path, ns=(1, 1))
    with pytest.raises(storage.ChangedError, match="a has changed"):
        storage.read_bytes(str(path), 2, 3, state)
    path.unlink()
    with pytest.raises(storage.ChangedError, match="a was removed"):
        storage.read_bytes(str(path), 2, 3, state)
