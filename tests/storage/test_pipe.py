import signal
import sys
import time

import pytest
from refusing import refused

from diff_dalle import storage
from diff_dalle.storage import pipe


def command(text: str) -> str:
    return f'pipe:{sys.executable} -c "{text}"'


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_pipe_is_read_and_its_failure_detected():
    assert storage.read_bytes(command("print('x' * 5)")).strip() == b"xxxxx"
    assert storage.read_bytes(command("print('abcdef')"), 2, 3) == b"cde"
    with pytest.raises(storage.UnavailableError, match="failed with status 3"):
        storage.read_bytes(command("print('half'); raise SystemExit(3)"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize(
    "text", ["sleep 60 & echo $!; wait", "sleep 60 & echo $!", "sleep 60 & echo $!; exec >&-; wait"]
)
def test_a_silent_command_is_killed_with_all_its_processes(monkeypatch, text):
    """Also when the shell has ended, or its output has, while a child goes on."""
    monkeypatch.setattr(pipe, "SILENT_SECONDS", 0.4)
    if "exec" in text:
        text = "sleep 60 >/dev/null & echo $!; exec >&-; wait"
    with storage.open_read(f"pipe:{text} # token=secret") as stream:
        child = int(stream.readline())
        with refused(r"pipe:sleep .*token=\*\*\*: .* was killed after 0.4 s without a byte"):
            stream.read()
    for _ in range(200):
        if not is_running(child):
            break
        time.sleep(0.01)
    assert not is_running(child)


def test_only_waiting_counts_as_silence(monkeypatch):
    monkeypatch.setattr(pipe, "SILENT_SECONDS", 1.0)
    with storage.open_read("pipe:head -c 3000000 /dev/zero") as stream:  # starts at once, unlike Python
        stream.read(10)
        time.sleep(1.2)
        assert len(stream.read()) == 3_000_000 - 10


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_a_command_of_which_the_rest_is_not_read_is_killed():
    with storage.open_read("pipe:echo 1; sleep 20") as stream:
        assert stream.readline() == b"1\n"
        process = stream.raw.process
    assert process.returncode == -signal.SIGKILL
