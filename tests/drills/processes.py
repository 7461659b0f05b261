"""Processes of the drill: started with a mark, limited in time, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import script_running

from .contract import Deviation, require

TESTS = Path(__file__).resolve().parents[1]
SCRIPTS = TESTS.parent / "scripts"
INSIDE = "drills.inside"
MARK = "DIFF_DALLE_DRILL"  # environment variable of a drill's processes
SLOWEST = 240.0  # seconds after which a run without a limit of its own counts as hanging, on a busy machine too
LINGERING = 15.0  # seconds that workers may outlive their run; torch's notice its end within 5
POLL = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit status (negative = signal), stdout and stderr, seconds."""

    status: int
    output: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The lines that report an error."""
        return [line for line in self.output.splitlines() if line.startswith(("error: ", "rank "))]

    def succeeded(self, otherwise: str = "it failed") -> Outcome:
        """Itself. Deviation unless the status is 0."""
        require(self.status == 0, f"{otherwise}: {self.tail()}")
        return self

    def without_traceback(self) -> Outcome:
        """Itself. Deviation if it has one."""
        require("Traceback (most recent call last)" not in self.output, f"a traceback: {self.tail(800)}")
        return self

    def tail(self, characters: int = 400) -> str:
        """The end of the output in one line, for messages."""
        return " ⏎ ".join(line for line in self.output[-characters:].splitlines() if line.strip())


def environment(**added: str) -> dict[str, str]:
    """``script_running``'s, with package and tests on the path."""
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    return {**script_running.environment(), "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **added}


class Job:
    """A command in progress. Its output goes to a file, so that nobody waits for a reader.

    limits: resource limits by their names in ``resource`` (RLIMIT_NOFILE, …).
    """

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        env: Mapping[str, str],
        limits: Mapping[str, int] | None = None,
    ):
        self.mark, self.output, self.started = secrets.token_hex(8), output, time.monotonic()
        chosen = {getattr(resource, name): value for name, value in (limits or {}).items()}

        def prepare():
            for limit, value in chosen.items():
                resource.setrlimit(limit, (value, value))

        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                list(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**env, MARK: self.mark},
                start_new_session=True,
                preexec_fn=prepare if chosen else None,
                cwd=output.parent,
            )

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = SLOWEST) -> bool:
        """Wait for a condition; False when the run ends before it holds. Deviation after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self.process.poll() is not None:
                return reached()
            if time.monotonic() > deadline:
                self.end()
                raise Deviation(f"{what} was not reached within {seconds:.0f} s: {self._outcome().tail()}")
            time.sleep(POLL)
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def wait(self, seconds: float = SLOWEST) -> Outcome:
        """The outcome. Deviation when the run, or a process it started, does not end in time."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise Deviation(f"hang: no end within {seconds:.0f} s: {self._outcome().tail()}") from None
        outcome = self._outcome()
        deadline = time.monotonic() + LINGERING
        while left := list(survivors(self.mark)):
            if time.monotonic() > deadline:
                self.end()
                raise Deviation(f"{len(left)} of its processes still ran {LINGERING:.0f} s after its end")
            time.sleep(POLL)
        return outcome

    def end(self) -> None:
        """End the run and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + LINGERING
        while (left := list(survivors(self.mark))) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(POLL)

    def _outcome(self) -> Outcome:
        return Outcome(self.process.returncode, self.text(), time.monotonic() - self.started)


def survivors(mark: str) -> Iterator[int]:
    """The living processes whose environment has a mark. None can be found where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end at any moment
            if wanted in (entry / "environ").read_bytes().split(b"\0") and _state(entry) != "Z":
                yield int(entry.name)


def is_running(process: int) -> bool:
    """Whether a process lives, stopped or not."""
    try:
        return _state(Path("/proc") / str(process)) not in "ZX"
    except OSError:
        return False


def _state(process: Path) -> str:
    """One letter: R, S, T (stopped), Z (ended, but not yet collected by its parent)."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def mpiexec(processes: int) -> list[str]:
    """The launcher of the environment's own MPI."""
    return [str(Path(sys.executable).with_name("mpiexec")), "-n", str(processes), sys.executable]


def torchrun(processes: int) -> list[str]:
    """Standalone: on a free port, since drills run in parallel."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
