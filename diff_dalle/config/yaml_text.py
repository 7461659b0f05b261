"""YAML and JSON texts as mappings: data only, no silently repeated keys, and bounded in depth and size."""

from __future__ import annotations

import re

import yaml

from ..errors import InputError

MAX_DEPTH = 32  # levels; our own files have four
MAX_NODES = 1_000_000  # values; a run.json with every checkpoint of a long run has tens of thousands


class _StrictLoader(yaml.SafeLoader):
    """YAML without executable tags, without silently repeated keys, and with 1e-4 read as a number.

    The limits are checked while nodes are composed, before anything is built from them. An alias counts as much as the
    node it repeats: a few lines of nested aliases can stand for billions of values.
    """

    def __init__(self, stream):
        super().__init__(stream)
        self.depth = 0
        self.extents: dict[int, tuple[int, int]] = {}  # by id of a finished node: its number of nodes, its height

    def compose_node(self, parent, index):
        line, is_alias = self.peek_event().start_mark.line + 1, self.check_event(yaml.AliasEvent)
        self.depth += 1
        self._check(1, 0, line)
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self.extents:
            raise InputError(f"an alias stands inside the value that it repeats (line {line})")
        if not is_alias:
            self.extents[id(node)] = self._extent(node)
        size, height = self.extents[id(node)]
        self._check(size, height - 1, line)
        self.depth -= 1
        return node

    def _extent(self, node) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            return 1, 1
        children = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        sizes, heights = (
            zip(*(self.extents[id(child)] for child in children), strict=True) if children else ((0,), (0,))
        )
        return 1 + sum(sizes), 1 + max(heights)

    def _check(self, size: int, below: int, line: int) -> None:
        if self.depth + below > MAX_DEPTH:
            raise InputError(f"values are nested more than {MAX_DEPTH} levels deep (line {line})")
        if size > MAX_NODES:
            raise InputError(f"it holds more than {MAX_NODES:,} values, repeated ones included (line {line})")

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise InputError(f"setting {key.value} is given twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
        return node


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return " ".join(str(error).split())


def load_mapping(text: str, name: str) -> dict:
    """The mapping in a YAML or JSON text. ``name`` is used in messages.

    Raises InputError for any other text, for a key given twice, and for values nested too deeply or too many.
    """
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not; JSON has none within texts
    try:
        mapping = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: data only
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except Exception as error:  # beside YAMLError, whatever a bad tag or date makes PyYAML raise: KeyError, IndexError…
        raise InputError(f"{name} is not valid YAML or JSON: {_reason(error)}") from None
    if not isinstance(mapping, dict):
        raise InputError(f"{name} must hold settings as `name: value` lines")
    return mapping
