"""YAML and JSON texts as mappings: data only, no silently repeated keys, and bounded in depth and size.

Scalars are those of YAML 1.2's core schema: ``yes`` and ``1:30`` are texts, ``010`` is ten. PyYAML itself follows YAML
1.1, which reads them as true, 90 and eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import yaml

from .errors import InputError, cut

MAX_DEPTH = 32  # levels; our own files have four
MAX_NODES = 20_000  # values, of lists of shards; our own files have a hundred
MAX_KEYS = 2_000  # a resolved config of the largest command has 300
MAX_TEXT = 2**20  # characters
# A text in quotes, which is kept as group 1, or a comment, which begins a word.
_COMMENT = re.compile(
    r"""("(?:[^"\\]|\\.)*"?|'[^']*'?)|(?<![^\s,\[\]{}])(?://[^\n]*|/\*.*?(?:\*/|\Z)|\#[^\n]*)""", re.DOTALL
)
_SCALARS = {  # tag: the plain texts that have it, and their first characters
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
MERGE = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """YAML without executable tags and without silently repeated keys.

    The limits are checked while nodes are composed, before anything is built from them. An alias counts as much as the
    node it repeats: a few lines of nested aliases can stand for billions of values.
    """

    def __init__(self, stream):
        super().__init__(stream)
        self.depth = self.nodes = self.keys = 0
        self.extents: dict[int, tuple[int, int]] = {}  # by id of a finished node: its number of nodes, its height

    def compose_node(self, parent, index):
        line, is_alias = self.peek_event().start_mark.line + 1, self.check_event(yaml.AliasEvent)
        self.depth += 1
        self._count(1, line)
        if index is None and parent is not None:
            self.keys += 1
            if self.keys > MAX_KEYS:
                raise InputError(f"it holds more than {MAX_KEYS:,} keys (line {line})")
        self._check_depth(0, line)
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self.extents:
            raise InputError(f"an alias stands inside the value that it repeats (line {line})")
        if is_alias:
            size, height = self.extents[id(node)]
            self._count(size - 1, line)
            self._check_depth(height - 1, line)
        else:
            self.extents[id(node)] = self._extent(node)
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

    def _check_depth(self, below: int, line: int) -> None:
        if self.depth + below > MAX_DEPTH:
            raise InputError(f"values are nested more than {MAX_DEPTH} levels deep (line {line})")

    def _count(self, nodes: int, line: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise InputError(f"it holds more than {MAX_NODES:,} values, repeated ones included (line {line})")

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise InputError(f"setting {cut(key.value)} is given twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
        return node

    def flatten_mapping(self, node):
        """Put merged keys before a mapping's own, which win over them; of several mappings the first wins. PyYAML 6.0.4
        lets a merged mapping win over what it was merged into."""
        own: list = []
        merged: list = []
        for key, value in node.value:
            if key.tag != MERGE:
                own.append((key, value))
                continue
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(each, yaml.MappingNode):
                    raise InputError(f"<< merges something that is no mapping (line {each.start_mark.line + 1})")
                self.flatten_mapping(each)
                merged = each.value + merged
        node.value = merged + own

    def construct_yaml_int(self, node) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)

    def construct_yaml_float(self, node) -> float:
        text = self.construct_scalar(node)
        return float(text.replace(".", "") if text.lstrip("+-.").lower() in ("inf", "nan") else text)


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that YAML 1.1 or 1.2 would read as something else."""


_StrictLoader.yaml_implicit_resolvers = {}  # none of YAML 1.1
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_yaml_float)


def to_yaml(mapping: Mapping) -> str:
    """A text that ``load_mapping`` reads back."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _reason(error: Exception, column: bool) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}" + (f", column {mark.column + 1})" if column else ")")
    return " ".join(str(error).split())


def load_mapping(text: str, name: str) -> dict:
    """The mapping in a YAML or JSON text; JSON may have comments and trailing commas. ``name`` is used in messages.

    Raises InputError for any other text, for a key given twice, and for values nested too deeply or too many.
    """
    return load_located(text, name)[0]


def load_located(text: str, name: str) -> tuple[dict, dict[tuple[str | int, ...], int]]:
    """``load_mapping``, and the line of every value in it by its path: keys, as texts, and indices."""
    mapping, node = _load(text, name)
    if not isinstance(mapping, dict):
        raise InputError(f"{name} must hold settings as `name: value` lines")
    return mapping, dict(_lines(node, ()))


def load_texts(text: str, name: str) -> list[str]:
    """The texts in a YAML or JSON list. Raises InputError as ``load_mapping`` does, and for a list of anything else."""
    found, _ = _load(text, name)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InputError(f"{name} must hold a list of texts, as `- text` lines")
    return found


def _load(text: str, name: str) -> tuple[object, yaml.Node | None]:
    if len(text) > MAX_TEXT:
        raise InputError(f"{name} has more than {MAX_TEXT:,} characters, so it holds no settings")
    plain = _blank_comments(text)
    is_json = plain.lstrip().startswith("{")
    if is_json:
        text = plain.replace("\t", " ")  # JSON may be indented with tabs, YAML may not; JSON has none within texts
    loader = None
    try:
        loader = _StrictLoader(text)  # a SafeLoader: data only
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except Exception as error:  # beside YAMLError, whatever a bad tag or date makes PyYAML raise: KeyError, IndexError…
        raise InputError(f"{name} is not valid YAML or JSON: {_reason(error, is_json)}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _blank_comments(text: str) -> str:
    """JSON without its comments, the rest in place. Slashes within a word are none, as in the URL of a YAML text."""
    return re.sub(_COMMENT, lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)


def _lines(node, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """(path, line) of the values below a node: that of the key in a mapping, that of the item in a list."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield (*path, key.value), key.start_mark.line + 1
                yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*path, i), value.start_mark.line + 1
            yield from _lines(value, (*path, i))
