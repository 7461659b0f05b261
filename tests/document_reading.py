"""The commands and files of the published documents, read from tests/documents/given: their code blocks, flags and
tables of options, under their headings, without their prose."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

GIVEN = Path(__file__).parent / "documents" / "given"
RECORDED = "".join(f"{name}() {{ printf '%s\\037' {name} \"$@\"; echo; }}\n" for name in ("pip", "python", "mpiexec"))


def sections(document: str) -> dict[str, str]:
    """The text under each heading, by the headings above it: ``Training/Generator``."""
    found: dict[str, str] = {}
    above: list[str] = []
    fenced = False
    for line in (GIVEN / document).read_text(encoding="utf-8").splitlines():
        heading = re.match(r"(#+) (.+)", line)
        if line.startswith("```"):
            fenced = not fenced
        if heading and not fenced:
            above = [*above[: len(heading[1]) - 1], *[""] * (len(heading[1]) - 1 - len(above)), heading[2]]
        path = "/".join(filter(None, above))
        found[path] = found.get(path, "") + line + "\n"
    return found


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def write_modules(text: str, folder: Path) -> None:
    """The blocks of Python that begin with the name of a file, ``# my_parts.py``, as these files."""
    for block in blocks(text, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")


def commands(text: str, **variables: str) -> list[list[str]]:
    """The words of the commands in a text's blocks of bash, as a shell expands them.

    variables: of the environment.
    """
    script = RECORDED + "\n".join(blocks(text, "bash"))
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=variables).stdout
    return [line.rstrip("\037").split("\037") for line in out.splitlines()]


def options(text: str) -> dict[str, str]:
    """The default of each option in a section's table; N/A for required ones."""
    return dict(re.findall(r"^\| `(\w+)` \| \w+ \| `?(.*?)`? \|$", text, re.MULTILINE))


def shrunk(words: Sequence[str], sizes: Mapping[str, object]) -> list[str]:
    """A command line with smaller values for some of its flags."""
    found = list(words)
    for i, word in enumerate(words[:-1]):
        if word in sizes:
            found[i + 1] = str(sizes[word])
    return found
