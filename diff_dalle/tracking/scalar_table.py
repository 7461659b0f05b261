"""Scalars as a table of text, in the look of Guided-Diffusion's log.txt."""

from __future__ import annotations

from collections.abc import Mapping

WIDTH = 40  # characters of a name; longer ones lose their middle


def format_table(scalars: Mapping[str, float]) -> str:
    """Lines of ``| name | value |`` in the order of the names, between two rules.

    Whole numbers are written out, others with three significant digits. Names with a dot are left out: they are the
    details of something (``table.cell``) that is too much to read here.
    """
    scalars = {name: value for name, value in scalars.items() if "." not in name}
    names = [name if len(name) <= WIDTH else f"{name[:18]}...{name[-19:]}" for name in sorted(scalars)]
    values = [f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}" for _, value in sorted(scalars.items())]
    left, right = max(map(len, names), default=0), max(map(len, values), default=0)
    rule = "-" * (left + right + 7)
    lines = [f"| {name:{left}} | {value:{right}} |" for name, value in zip(names, values, strict=True)]
    return "\n".join([rule, *lines, rule])
