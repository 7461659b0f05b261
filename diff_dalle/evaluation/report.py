"""Markdown reports: tables, text, and images saved beside the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from .. import storage
from ..images.output import png_bytes


@dataclass(frozen=True)
class Section:
    """text: Markdown. image: saved beside the report as ``image_name`` (a png) and shown below the text; or None."""

    title: str
    text: str = ""
    image: Image.Image | None = None
    image_name: str = ""


def _cell(value) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """Floats are written with four significant digits."""
    lines = [list(header), ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(path: str, title: str, sections: Sequence[Section]) -> None:
    """Write the images, then the report. Each file of an earlier report is replaced atomically."""
    folder, _ = storage.split(path)
    storage.make_dirs(folder or ".")
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        if section.text:
            parts.append(section.text.strip())
        if section.image is not None:
            storage.write_bytes(storage.join(folder, section.image_name), png_bytes(section.image))
            parts.append(f"![{section.title}]({section.image_name})")
    storage.write_bytes(path, ("\n\n".join(parts) + "\n").encode())
