"""The size of the house, and how its rooms depend on each other: python tests/figures.py

Tokens are those of code: no comments, docstrings and blank lines. An arrow is a pair of rooms of which one imports from
the other; a room stands one floor above the highest that it imports from.
"""

from __future__ import annotations

import ast
import functools
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diff_dalle"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def tokens_of(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                documentation.update(range(first.lineno, (first.end_lineno or 0) + 1))
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in NO_CODE and token.start[0] not in documentation for token in found)


def room_of(path: Path) -> str:
    """The top folder or module of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else ()
        module = (*base, *(node.module.split(".") if node.module else ()))
        if module[:1] != ("diff_dalle",):
            continue
        yield from [module[1]] if len(module) > 1 else [alias.name for alias in node.names]


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        found[room_of(path)].update(imported_rooms(path))
    return {room: (others & found.keys()) - {room} for room, others in found.items()}


def floors(below: dict[str, set[str]]) -> int:
    @functools.cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in below.get(room, ())), default=0)

    return max(map(floor, below))


def runs() -> dict[str, int]:
    """The ancestors of the settings of every training."""
    from diff_dalle.checkpoints.kinds import TRAINING_COMMANDS

    return {
        kind: sum(each.__module__.startswith("diff_dalle") for each in command.config_class.__mro__[1:])
        for kind, command in TRAINING_COMMANDS.items()
    }


def main() -> None:
    rooms: Counter[str] = Counter()
    files = list(PACKAGE.rglob("*.py"))
    for path in files:
        rooms[room_of(path)] += tokens_of(path)
    below = arrows()
    inheritance = runs()
    deepest = max(inheritance, key=inheritance.__getitem__)
    rows = {
        "tokens of code in diff_dalle": sum(rooms.values()),
        "… of commands and recipes": rooms["commands"] + rooms["recipes"],
        "files in diff_dalle": len(files),
        "tokens in tests": sum(map(tokens_of, (ROOT / "tests").rglob("*.py"))),
        "rooms": len(below),
        "floors": floors(below),
        "arrows between rooms": sum(map(len, below.values())),
        f"classes of ours above the settings of a training ({deepest})": inheritance[deepest],
    }
    for name, value in rows.items():
        print(f"{value:>9,}  {name}")
    if "-v" in sys.argv:
        for room, count in rooms.most_common():
            print(f"{count:>9,}  {room}: {', '.join(sorted(below[room])) or 'nothing'}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
