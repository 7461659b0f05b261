"""Reports as data, and the one place where they become Markdown, for files and for the console."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from .. import storage
from ..images.output import png_bytes


@dataclass(frozen=True)
class Table:
    """Floats are written with four significant digits."""

    header: Sequence[object]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        return self.markdown()

    def markdown(self, aligned: bool = False) -> str:
        """aligned: pad the cells of a column to one width, for the console."""
        cells = [[str(each) for each in self.header], *([_cell(each) for each in row] for row in self.rows)]
        widths = [max(3, *map(len, column)) if aligned else 0 for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * max(width, 3) for width in widths])
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in padded)


@dataclass(frozen=True)
class Figure:
    """name: of its file, a png beside the report; image: None = the file is there; title: None = the section's."""

    name: str
    image: Image.Image | None = None
    title: str | None = None


@dataclass(frozen=True)
class Section:
    """parts: Markdown, tables, figures and sections below this one."""

    title: str
    parts: Sequence[Part]

    @property
    def text(self) -> str:
        """Of what is no figure."""
        return rendered([part for part in self.parts if not isinstance(part, Figure)])

    @property
    def figures(self) -> Iterator[Figure]:
        for part in self.parts:
            if isinstance(part, Figure):
                yield part
            elif isinstance(part, Section):
                yield from part.figures


Part = str | Table | Figure | Section


def rendered(parts: Iterable[Part], level: int = 1, title: str = "", aligned: bool = False) -> str:
    """Markdown. level: of the headings of sections; title: of figures without one; aligned: as in ``Table.markdown``.
    Empty texts are left out."""
    texts = []
    for part in parts:
        if isinstance(part, Section):
            texts += [f"{'#' * level} {part.title}", rendered(part.parts, level + 1, part.title, aligned)]
        elif isinstance(part, Figure):
            texts.append(f"![{title if part.title is None else part.title}]({part.name})")
        elif isinstance(part, Table):
            texts.append(part.markdown(aligned))
        else:
            texts.append(part.strip())
    return "\n\n".join(filter(None, texts))


def markdown_table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """``Table`` as text."""
    return str(Table(header, rows))


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


@dataclass(frozen=True)
class Report:
    """What an evaluation finds.

    scores:  entries of scores.json.
    summary: Markdown for the console.
    """

    sections: Sequence[Section] = ()
    scores: Mapping[str, Any] = field(default_factory=dict)
    summary: Sequence[Part] = ()

    @staticmethod
    def joined(found: Iterable[Report]) -> Report:
        sections, scores, summary = list[Section](), dict[str, Any](), list[Part]()
        for each in found:
            sections += each.sections
            scores |= each.scores
            summary += each.summary
        return Report(sections, scores, summary)

    def write(self, folder: str, title: str) -> str:
        """Write the figures, then report.md and scores.json. Each file of an earlier report is replaced atomically.
        Returns the path of the report."""
        storage.make_dirs(folder or ".")
        whole, path = Section(title, self.sections), storage.join(folder, "report.md")
        for figure in whole.figures:
            if figure.image is not None:
                storage.write_bytes(storage.join(folder, figure.name), png_bytes(figure.image))
        storage.write_bytes(path, f"{rendered([whole])}\n".encode())
        if self.scores:
            storage.write_bytes(storage.join(folder, "scores.json"), json.dumps(self.scores, indent=1).encode())
        return path
