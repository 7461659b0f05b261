"""Scalars as a text table, in the format of Guided-Diffusion's log.txt."""

from __future__ import annotations

from collections.abc import Mapping

WIDTH = 40  # maximum characters of a name; longer names are shortened in the middle


def format_table(scalars: Mapping[str, float]) -> str:
    """Lines of ``| name | value |``, sorted by name, between two rules.

    Integers are printed in full, other numbers with three significant digits. Names with a dot are left out: they are
    cells of a table (``table.cell``), too many to read here.
    """
    scalars = {name: value for name, value in scalars.items() if "." not in name}
    names = [name if len(name) <= WIDTH else f"{name[:18]}...{name[-19:]}" for name in sorted(scalars)]
    values = [f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}" for _, value in sorted(scalars.items())]
    left, right = max(map(len, names), default=0), max(map(len, values), default=0)
    rule = "-" * (left + right + 7)
    lines = [f"| {name:{left}} | {value:{right}} |" for name, value in zip(names, values, strict=True)]
    return "\n".join([rule, *lines, rule])
