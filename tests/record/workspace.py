"""A folder in which the recorded commands run; what they print and write there reads the same on every machine."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import tarfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

RECORD = Path(__file__).parent
ROOT = RECORD.parent.parent
GIVEN, CHECKPOINTS = RECORD / "given", RECORD / "checkpoints"
sys.path += [str(RECORD.parent), str(ROOT / "scripts")]  # as pytest finds them, for a record that is taken without it

from script_running import run_here  # noqa: E402

TEMPORARY = (".diff_dalle_index", ".lock")  # parts of the names of files that are no result


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """What went wrong; of a traceback, the exception alone."""
        lines = self.err.strip().splitlines() or ["(nothing)"]
        starts = [line for line in lines if line.startswith("Traceback")]
        return f"a traceback: {lines[-1]}" if starts else "\n".join(lines)


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """As if a package were not installed."""
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        if before:
            sys.modules[package] = before


class Workspace:
    """The given files in a new folder, with the checkpoints of earlier versions in its folder ``old``."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        shutil.copytree(GIVEN, self.folder, dirs_exist_ok=True)
        for archive in sorted(CHECKPOINTS.glob("*.tar.xz")):
            self.unpack(archive)

    def unpack(self, archive: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(self.folder / "old", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))

    def run(self, line: str, plots: bool = True) -> Result:
        """Run ``SCRIPT FLAGS`` in the folder, within this process; plots: if not, as if matplotlib were missing."""
        script, *flags = shlex.split(line)
        hidden = contextlib.nullcontext() if plots else _hidden("matplotlib")
        slow = mock.patch("diff_dalle.models.precision.has_fast_bf16", lambda: False)  # fp32 on every CPU
        with self.inside(), mock.patch.dict(os.environ, COLUMNS="1000"), slow, hidden:
            try:
                done = run_here(script, flags)
            except Exception:
                return Result(1, "", self.plain(traceback.format_exc()))
        return Result(done.returncode, self.plain(done.stdout), self.plain(done.stderr))

    def need(self, line: str, plots: bool = True) -> Result:
        """``run`` of what must succeed."""
        result = self.run(line, plots)
        assert result.status == 0, f"{line}\n{result.err}"
        return result

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            os.chdir(before)

    def files(self) -> set[str]:
        paths = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return {path for path in paths if not any(part in path for part in TEMPORARY)}

    def plain(self, text: str) -> str:
        """Text without what differs between machines and versions of Python."""
        text = text.replace(str(self.folder), "FOLDER").replace(str(ROOT), "CHECKOUT")
        text = re.sub(r"(--\w+) (\w+), (--\w+ \2)", r"\1, \3", text)  # before Python 3.13
        text = re.sub(r"(?m)^(  -\S.*?) {2,}(?=\S)", r"\1  ", text)  # columns of help
        text = re.sub(r"\(choose from [^)]*\)", lambda found: found[0].replace("'", ""), text)  # before Python 3.12
        text = re.sub(r"\(known: ([^)]*)\)", lambda found: f"(known: {', '.join(sorted(found[1].split(', ')))})", text)
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
