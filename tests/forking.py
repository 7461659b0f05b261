"""Python processes that start in milliseconds instead of seconds: copies of one that has imported torch.

``start(["script.py", "--flag"], env)``, also with ``-m`` and ``-c``, behaves as ``subprocess.Popen`` of python with
text pipes, and is just that other than on Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from file_server import unused_port

NAMES = ("recipes.generator", "recipes.classifier", "recipes.decoder", "recipes.train", "commands.sample")
NAMES += ("commands.evaluate", "commands.prepare")
TORCH = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]  # what training imports in use
MODULES = [*TORCH, *(f"diff_dalle.{name}" for name in NAMES)]
NEWS = struct.Struct("ii")  # process and 0, then process and exit status


def start(
    arguments: Sequence[str],
    env: Mapping[str, str],
    merged: bool = False,
    start_new_session: bool = False,
    output: Path | None = None,
):
    """A process. merged: whether stderr goes to stdout. output: a file for both, in whose folder it runs."""
    if sys.platform == "linux":
        return Forked(arguments, env, merged, start_new_session, output)
    with open(output, "wb") if output else contextlib.nullcontext(subprocess.PIPE) as stdout:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            stdout=stdout,
            stderr=subprocess.STDOUT if merged or output else subprocess.PIPE,
            text=True,
            start_new_session=start_new_session,
            cwd=output.parent if output else None,
        )


def start_ranks(arguments: Sequence[str], env: Mapping[str, str], size: int, **options) -> list:
    """The processes of a job as srun starts them; nothing ends them but themselves."""
    return [start(arguments, {**env, **own}, **options) for own in srun(size)]


def srun(size: int) -> list[dict[str, str]]:
    """The variables that srun sets for each rank of a job on this machine."""
    step = {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size)}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    return [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(size)]


def ends(processes: Sequence, timeout: float = 240) -> list[tuple[int | None, str, str]]:
    """(status, stdout, stderr) of each process; what still runs then is killed, with status None."""
    found = []
    for process in processes:
        try:
            texts = process.communicate(timeout=timeout)
            found.append((process.returncode, *texts))
        except subprocess.TimeoutExpired:
            process.kill()
            found.append((None, *process.communicate()))
    return found


def run_ranks(arguments: Sequence[str], env: Mapping[str, str], size: int = 2) -> subprocess.CompletedProcess:
    """The outcome of a job as a launcher would give it: the first status that is not 0, and all output."""
    statuses, outs, errs = zip(*ends(start_ranks(arguments, env, size)), strict=True)
    status = next((status for status in statuses if status != 0), 0)
    return subprocess.CompletedProcess(arguments, status, "".join(outs), "".join(errs))


class Forked:
    """What of ``subprocess.Popen`` the tests need."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], merged: bool, start_new_session: bool, output):
        self.args, self.returncode = arguments, None
        request = [list(arguments), dict(env), str(output.parent) if output else os.getcwd(), start_new_session]
        pipes = [os.pipe() for _ in range(1 if output else 2 if merged else 3)]  # what happened to it, stdout, stderr
        files = [os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)] if output else []
        written = [*(end for _, end in pipes), *files]
        socket.send_fds(_server(), [json.dumps(request).encode()], written)
        for descriptor in written:
            os.close(descriptor)
        self._news, *streams = (read for read, _ in pipes)
        self.stdout, self.stderr = ([os.fdopen(stream) for stream in streams] + [None, None])[:2]
        self.pid, _ = NEWS.unpack(os.read(self._news, NEWS.size))
        self._texts = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            _, self.returncode = NEWS.unpack(os.read(self._news, NEWS.size))
            os.close(self._news)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        if not self._texts:  # a call after a time-out reads on
            pool = ThreadPoolExecutor(len(streams))
            self._texts = [pool.submit(stream.read) for stream in streams]
            pool.shutdown(wait=False)
        self.wait(timeout)
        out, err = ([text.result() for text in self._texts] + [None])[:2]
        for stream in streams:
            stream.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """The connection to a process that copies itself, until this one ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        _server.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours


def _serve(requests: socket.socket) -> list[str]:
    """Copy this process for every request; returns in the copies, with their arguments."""
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("diff_dalle.text.tokenizer").load_tokenizer()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the copies"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watching processes
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            os._exit(0)
        news, *streams = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process = os.fork()
            if process == 0:
                os.close(news)
                requests.close()
                return _become(*json.loads(message), streams)
            for stream in streams:
                os.close(stream)
            os.write(news, NEWS.pack(process, 0))
            os.write(news, NEWS.pack(process, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(arguments: list[str], env: dict[str, str], folder: str, new_session: bool, streams: list[int]) -> list[str]:
    """Take the place of a new process."""
    for number, stream in ((1, streams[0]), (2, streams[-1])):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.chdir(folder)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return arguments


def _run(arguments: list[str]) -> None:
    """As ``python ARGUMENTS`` does."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


def _leave(status: int) -> NoReturn:
    """As python does, without giving back all that was imported, which takes longer than all else."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    started = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _run(started)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        _leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)
