"""Filters of samples by their json: a small language with Python's spelling, of which Python evaluates nothing.

``aesthetic_score > 4.5 and "cat" in caption`` names keys of a sample's json; so does the pair
``["aesthetic_score", "lambda s: s > 4.5"]``, and ``[["width", "height"], "lambda w, h: w * h >= 65536"]`` with several
keys. There are comparisons, ``in``, ``and``, ``or``, ``not``, ``+ - * /`` of numbers, ``len(…)``, numbers, texts and
lists of them; nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..config import ABSENT, Fault, InputError, option, quoted
from ..images.decode import BrokenSample
from .captions import read_record

LANGUAGE = 1  # part of a filter's fingerprint: raise it when an expression comes to mean something else
MAX_TEXT = 1000  # characters of an expression
MAX_DEPTH = 24  # expressions within each other
Evaluate = Callable[[Mapping[str, object]], object]
ALLOWED = "comparisons, in, and, or, not, + - * /, len(…), numbers, texts, lists and names"

_COMPARISONS: dict[type[ast.cmpop], Callable] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_ARITHMETIC: dict[type[ast.operator | ast.unaryop], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def filters_option() -> Any:
    """The setting ``dataset_filters`` of every command that reads samples from shards."""
    return option(
        (),
        "conditions on the samples' json, all of which a sample must meet: expressions such as aesthetic_score > "
        '4.5, or pairs such as ["aesthetic_score", "lambda s: s > 4.5"]',
        nested=True,
    )


class Verdict(IntEnum):
    """What a filter says about a sample. The numbers are stored."""

    ACCEPTED = 0
    REFUSED = 1
    NO_JSON = 2
    NO_KEY = 3
    WRONG_TYPE = 4


#: Of those that reject, for messages.
REASONS = ("by their values", "without a readable .json", "without the key", "with values of another type")


@dataclass(frozen=True)
class Filter:
    """A condition on the json of a sample. Made by ``parse``.

    text: as it was given. keys: of the json, each bound to the name in ``names`` at its place. body: what must be true,
    and value: its value, of those of the names.
    """

    text: str
    keys: tuple[str, ...]
    names: tuple[str, ...]
    body: ast.expr
    value: Evaluate

    @classmethod
    def parse(cls, text: str) -> Filter:
        """A filter from an expression, or from the JSON text of a pair. Raises InputError for anything else."""
        pair = _pair(text)
        source = " ".join((pair[1] if pair else text).split())
        if len(source) > MAX_TEXT:
            raise _fault(f"has an expression of {len(source):,} characters, but at most {MAX_TEXT:,} may be")
        where = f": {quoted(source)}"
        try:
            with warnings.catch_warnings():  # about odd escapes in texts
                warnings.simplefilter("ignore")
                body = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            place = getattr(error, "offset", 0) or len(source) + 1
            raise _fault(
                f"{where} is no expression ({getattr(error, 'msg', 'too deep')} at character {place})"
            ) from None
        function = body if isinstance(body, ast.Lambda) else None
        if function and not pair:
            raise _fault(f"{where} does not say its keys: write [KEY, {json.dumps(source)}]")
        if pair and not function:
            raise _fault(f"{where} must be a lambda of {', '.join(pair[0])}, such as lambda s: s > 4.5")
        body = function.body if function else body
        compiler = _Compiler(source, where)
        value = compiler.compiled(body)
        names = _parameters(function, where) if function else tuple(compiler.names)
        for name, place in compiler.names.items():
            if name not in names:
                takes = ", ".join(names) or "none"
                raise _fault(f"{where} has the name {name!r} at character {place}, but its lambda takes {takes}")
        keys = pair[0] if pair else names
        if not keys:
            raise _fault(f"{where} names no key of the json")
        if len(keys) != len(names):
            raise _fault(f"{where} takes {len(names)} values, but there are {len(keys)} keys: {', '.join(keys)}")
        return cls(text, keys, names, body, value)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that are equal only for filters of equal meaning."""
        described = json.dumps([LANGUAGE, self.keys, self.names, ast.dump(self.body)])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def __reduce__(self):
        return Filter.parse, (self.text,)

    def verdict(self, record: Mapping) -> Verdict:
        """Whether a json object is accepted, and if not, why. All keys must be there, whatever their values are."""
        if any(key not in record for key in self.keys):
            return Verdict.NO_KEY
        values = {name: record[key] for name, key in zip(self.names, self.keys, strict=True)}
        try:
            return Verdict.ACCEPTED if self.value(values) else Verdict.REFUSED
        except (TypeError, ValueError, ArithmeticError):
            return Verdict.WRONG_TYPE


def _fault(rule: str, value: object = ABSENT) -> InputError:
    return InputError(Fault("dataset_filters", rule, value))


def parse_filters(texts: Iterable[str]) -> tuple[Filter, ...]:
    """The filters of a setting. Raises InputError for one that is not of the language, or given twice."""
    found = tuple(Filter.parse(text) for text in texts)
    seen: set[str] = set()
    for each in found:
        if each.fingerprint in seen:
            raise _fault(f"has {quoted(each.text)} twice: leave one out")
        seen.add(each.fingerprint)
    return found


def verdicts(filters: Iterable[Filter], data: bytes | None) -> list[Verdict]:
    """What each filter says about the bytes of a sample's json member; None = it has none."""
    try:
        record = None if data is None else read_record(data)
    except BrokenSample:
        record = None
    return [Verdict.NO_JSON if record is None else each.verdict(record) for each in filters]


def _pair(text: str) -> tuple[tuple[str, ...], str] | None:
    """Keys and expression of a pair; None for a text that is no JSON list."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match value:
        case [str() as key, str() as source] if key:
            return (key,), source
        case [[*keys], str() as source] if keys and all(isinstance(key, str) and key for key in keys):
            return tuple(keys), source
    raise _fault("must be an expression, [KEY, LAMBDA] or [[KEY, KEY], LAMBDA]", text)


def _parameters(function: ast.Lambda, where: str) -> tuple[str, ...]:
    given = function.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs or given.defaults:
        raise _fault(f"{where} must take plain parameters, without defaults and stars")
    names = tuple(each.arg for each in given.args)
    if len({*names}) < len(names):
        raise _fault(f"{where} must take parameters of different names, not {', '.join(names)}")
    return names


class _Compiler:
    """Makes functions of the values of names out of expressions.

    ``names``: those in them that stand for values, each with its place. Raises InputError, which begins with ``where``,
    unless the language has all of an expression.
    """

    def __init__(self, source: str, where: str):
        self.source, self.where = source, where
        self.names: dict[str, int] = {}

    def compiled(self, node: ast.expr, depth: int = 1) -> Evaluate:
        at = len(self.source.encode()[: node.col_offset].decode()) + 1
        if depth > MAX_DEPTH:
            raise _fault(f"{self.where} has more than {MAX_DEPTH} expressions within each other at character {at}")

        def inner(*nodes: ast.expr) -> list[Evaluate]:
            return [self.compiled(each, depth + 1) for each in nodes]

        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return lambda values: value
            case ast.Name(id=name):
                self.names[name] = at
                return operator.itemgetter(name)
            case ast.BoolOp(op=op, values=nodes):
                return _until(isinstance(op, ast.Or), inner(*nodes))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                (given,) = inner(operand)
                return lambda values: not given(values)
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _ARITHMETIC:
                return _calculation(_ARITHMETIC[type(sign)], inner(operand))
            case ast.BinOp(op=sign, left=left, right=right) if type(sign) in _ARITHMETIC:
                return _calculation(_ARITHMETIC[type(sign)], inner(left, right))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                return _comparison([_COMPARISONS[type(op)] for op in ops], inner(left, *others))
            case ast.Call(func=ast.Name(id="len"), args=[argument], keywords=[]):
                (given,) = inner(argument)
                return lambda values: len(given(values))  # type: ignore[arg-type]  # a TypeError is an answer too
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = inner(*items)
                return lambda values: [part(values) for part in parts]
        part = ast.get_source_segment(self.source, node) or type(node).__name__
        raise _fault(f"{self.where} has {quoted(part)} at character {at}, but a filter has only {ALLOWED}")


def _until(stop: bool, parts: Iterable[Evaluate]) -> Evaluate:
    """The first value that is as true as ``stop``, else the last one."""

    def evaluate(values: Mapping[str, object]) -> object:
        found: object = None
        for part in parts:
            found = part(values)
            if bool(found) == stop:
                break
        return found

    return evaluate


def _calculation(calculate: Callable, parts: Iterable[Evaluate]) -> Evaluate:
    return lambda values: calculate(*(_number(part(values)) for part in parts))


def _comparison(comparisons: Sequence[Callable], parts: Sequence[Evaluate]) -> Evaluate:
    def evaluate(values: Mapping[str, object]) -> bool:
        one = parts[0](values)
        for compare, part in zip(comparisons, parts[1:], strict=True):
            other = part(values)
            if not compare(one, other):
                return False
            one = other
        return True

    return evaluate


def _number(value: object) -> int | float:
    """Only numbers are added and multiplied: a text times a number could fill the memory."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.40} is no number")
    return value
