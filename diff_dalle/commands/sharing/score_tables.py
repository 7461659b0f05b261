"""Tables of the scores in an evaluation report's scores.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...evaluation.report import markdown_table


def score_tables(scores: Mapping[str, Any]) -> Iterator[str]:
    """Markdown: a title and tables for each evaluator's scores. Lists, which are curves, are left out.

    A score is a number, or a mapping that has its interval: score or value, low, high.
    """
    for title, group in scores.items():
        if isinstance(group, Mapping) and (tables := list(_tables(group))):
            yield from (f"### {title}", *tables)


def _tables(group: Mapping[str, Any]) -> Iterator[str]:
    """Of a group: tasks, each with its chance and number; a value each; rows of values."""
    rows = {name: row for name, row in group.items() if isinstance(row, Mapping)}
    tasks = {name: row for name, row in rows.items() if _is_number(row.get("score")) and _score(row)}
    if tasks:
        columns = [name for name in ("chance", "n") if any(_is_number(row.get(name)) for row in tasks.values())]
        found = [[name, _score(row), *(_score(row.get(each)) for each in columns)] for name, row in tasks.items()]
        yield markdown_table(["task", "score", *columns], found)
    if single := [[name, text] for name, value in group.items() if name not in tasks and (text := _score(value))]:
        yield markdown_table(["", "value"], single)
    wide = {name: row for name, row in rows.items() if not _score(row) and any(map(_score, row.values()))}
    if wide:
        columns = list(dict.fromkeys(key for row in wide.values() for key, value in row.items() if _score(value)))
        found = [[name, *(_score(row.get(column)) for column in columns)] for name, row in wide.items()]
        yield markdown_table(["", *columns], found)


def _score(value: Any) -> str:
    """A score in a cell, with its interval; "" for anything else."""
    if isinstance(value, Mapping):
        found, low, high = (
            _score(each) for each in (value.get("score", value.get("value")), value.get("low"), value.get("high"))
        )
        return f"{found} ({low} – {high})" if found and low and high else ""
    return _short(value) if _is_number(value) else ""


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
