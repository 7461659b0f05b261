"""Markdown reports: tables, text, and pictures beside the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from .. import storage

# Okabe & Ito's palette, told apart by colour-blind readers too.
_LINES = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (0, 0, 0))


@dataclass(frozen=True)
class Section:
    """text: Markdown. picture, if any, is saved as ``picture_name`` (a png) beside the report and shown below it."""

    title: str
    text: str = ""
    picture: Image.Image | None = None
    picture_name: str = ""


def _cell(value) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """Numbers get four significant digits."""
    lines = [list(header), ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(path: str, title: str, sections: Sequence[Section]) -> None:
    """Write the report and, before it, its pictures; what was there is replaced file by file, never half."""
    folder, _ = storage.split(path)
    storage.make_dirs(folder or ".")
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        if section.text:
            parts.append(section.text.strip())
        if section.picture is not None:
            with storage.atomic_writer(storage.join(folder, section.picture_name)) as file:
                section.picture.save(file, "PNG")
            parts.append(f"![{section.title}]({section.picture_name})")
    storage.write_bytes(path, ("\n\n".join(parts) + "\n").encode())


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    return [low + (high - low) * k / count for k in range(count + 1)]


def line_plot(
    series: Mapping[str, Sequence[tuple[float, ...]]],
    x_label: str,
    y_range: tuple[float, float] = (0.0, 1.0),
    size: tuple[int, int] = (640, 360),
) -> Image.Image:
    """Lines through points (x, y) or (x, y, low, high), one for each name, with a legend on the right; low and high are
    the ends of an error bar."""
    canvas, font = Image.new("RGB", size, "white"), ImageFont.load_default()
    draw = ImageDraw.Draw(canvas)
    points = [point for line in series.values() for point in line]
    x_low, x_high = min((x for x, *_ in points), default=0.0), max((x for x, *_ in points), default=1.0)
    left, top, right, bottom = 50, 15, size[0] - 150, size[1] - 45

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1)
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return left + across * (right - left), bottom - min(max(up, 0.0), 1.0) * (bottom - top)

    for y in _ticks(*y_range):
        height = at(x_low, y)[1]
        draw.line([(left, height), (right, height)], fill=(225, 225, 225))
        draw.text((left - 8, height), f"{y:.3g}", fill="black", font=font, anchor="rm")
    for x in _ticks(x_low, x_high):
        draw.text((at(x, y_range[0])[0], bottom + 8), f"{x:.4g}", fill="black", font=font, anchor="ma")
    draw.text(((left + right) / 2, bottom + 25), x_label, fill="black", font=font, anchor="ma")
    for k, (name, line) in enumerate(series.items()):
        colour, placed = _LINES[k % len(_LINES)], [at(x, y) for x, y, *_ in line]
        draw.line(placed, fill=colour, width=2)
        for x, _, *bar in line:
            draw.line([at(x, end) for end in bar], fill=colour)
        for x, y in placed:
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
        draw.line([(right + 12, top + 8 + 18 * k), (right + 32, top + 8 + 18 * k)], fill=colour, width=3)
        draw.text((right + 38, top + 8 + 18 * k), name, fill="black", font=font, anchor="lm")
    return canvas
