"""Which tokens an adapter trains: new ones, added to a tokenizer, and existing ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..config import Fault, InputError, nearest, option, quoted
from .tokenizer import clean

if TYPE_CHECKING:  # settings need no torch
    from torch import Tensor


def tokens_option(needs: Sequence[str] = ()):
    """The setting ``train_tokens`` of every command that trains or reads adapters."""
    return option(
        (),
        'tokens to train, each a pair such as ["[fernando]", "^dog</w>"]: a new token, in [] or <>, initialized to '
        "the mean of the tokens matching the pattern, null = zeros; or, without brackets, a pattern of existing "
        "tokens and null; case is ignored, as texts are lowercased",
        nested=True,
        needs=needs,
    )


MAX_TOKENS = 64  # entries of ``train_tokens``
MAX_PATTERN, MAX_SYMBOL = 200, 64  # characters of a pattern, and of the tokens that patterns can find
SPECIAL = ("<|startoftext|>", "<|endoftext|>")  # the names of start and end in CLIP's vocabulary


@dataclass(frozen=True)
class TokenSpec:
    """One entry of ``train_tokens``. text: a new token's name with its brackets, in lower case as texts are, or a
    pattern of existing ones; init: pattern of the tokens with whose mean a new one begins; None = zeros."""

    text: str
    init: str | None = None

    @property
    def is_new(self) -> bool:
        return self.text[:1] + self.text[-1:] in ("[]", "<>")


def _wrong(rule: str) -> InputError:
    return InputError(Fault("train_tokens", rule))


def parse_token(entry: str) -> TokenSpec:
    """An entry: a JSON list of two, or a text alone. InputError for anything else."""
    try:
        values = json.loads(entry)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, (str, type(None))) for value in values):
        values = [entry]
    if len(values) > 2 or not values or not values[0]:
        raise _wrong(f'has {quoted(entry)}, but each must be a pair such as ["[star]", "^circle</w>"]')
    spec = TokenSpec(*values)
    if spec.is_new:
        spec = replace(spec, text=clean(spec.text))
    if not spec.is_new and spec.init is not None:
        raise _wrong(
            f"has {spec.text!r} with {spec.init!r} to begin with, but existing tokens begin as they are: "
            f"write null there, or [{spec.text.strip('^$')}] for a new token"
        )
    if spec.is_new and (any(map(str.isspace, spec.text)) or len(spec.text) < 3 or spec.text in SPECIAL):
        raise _wrong(
            f"adds {spec.text!r}, but a new token is a text without spaces in brackets, such as [star], <star>"
        )
    return spec


class Extensible(Protocol):
    """A tokenizer to which tokens can be added: ours, or another library's in our convention.

    vocab_size: with ``added``, the tokens that were added.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def added(self) -> Sequence[str]: ...

    def symbols(self) -> Sequence[str]:
        """The tokens to begin with, in the order of their ids from 0 on, without start and end."""

    def extended(self, added: Sequence[str]) -> Any:
        """One of its kind, with more tokens. InputError for tokens that it has."""

    def token_id(self, added: str) -> int:
        """The id of an added token. A negative one counts from the end of the vocabulary."""

    def __call__(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """As ``Tokenizer``."""


Kind = TypeVar("Kind", bound=Extensible)


@dataclass(frozen=True)
class TrainedTokens(Generic[Kind]):
    """tokenizer: with the new tokens. ids: of the trained tokens, new ones and others. sources: for each of them the
    ids of those in the original vocabulary with the mean of whose embeddings it begins; none = zeros."""

    tokenizer: Kind
    ids: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]


def find_tokens(tokenizer: Kind, specs: Sequence[TokenSpec], original: Kind | None = None) -> TrainedTokens[Kind]:
    """What ``train_tokens`` means for a tokenizer. InputError for new tokens that exist already, and for patterns that
    are not regular expressions or find nothing.

    original: the tokenizer whose tokens patterns can find, if ``tokenizer`` has more. Those that were added to it are
    found by patterns that no other token fits.
    """
    if len(specs) > MAX_TOKENS:
        raise _wrong(f"has {len(specs):,} entries, but may have up to {MAX_TOKENS}")
    known = original or tokenizer
    new = {spec.text: _matching(known, spec.init) if spec.init else () for spec in specs if spec.is_new}
    if len(new) < sum(spec.is_new for spec in specs):
        raise _wrong("names a new token twice: give each once")
    extended = tokenizer.extended(tuple(new))
    existing = {i for spec in specs if not spec.is_new for i in _matching(known, spec.text)}
    sources = {i: (i,) for i in sorted(existing)} | {extended.token_id(name): ids for name, ids in new.items()}
    return TrainedTokens(extended, tuple(sources), tuple(sources.values()))


def ids_of(spec: TokenSpec, tokenizer: Extensible) -> tuple[int, ...]:
    """The ids from 0 on that an entry trains, in the tokenizer that has the new tokens."""
    found = (tokenizer.token_id(spec.text),) if spec.is_new else _matching(tokenizer, spec.text)
    return tuple(i % tokenizer.vocab_size for i in found)


def _matching(tokenizer: Extensible, pattern: str) -> tuple[int, ...]:
    symbols, expression = tokenizer.symbols(), _compiled(pattern)
    found = tuple(i for i, symbol in enumerate(symbols) if len(symbol) <= MAX_SYMBOL and expression.search(symbol))
    found = found or tuple(tokenizer.token_id(each) for each in tokenizer.added if expression.search(each))
    if not found:
        plain = pattern.strip("^$")
        raise _wrong(f"has the pattern {pattern!r}, which finds no token{nearest(plain, symbols)}")
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    """InputError for a pattern that is none, or that may take a long time: files of others have them too."""
    plain = re.sub(r"\\.", "a", pattern)
    repeats = sum(map(plain.count, "*+?{"))
    if len(pattern) > MAX_PATTERN or plain.count("(") > 1 or repeats > 2 or re.search(r"\)[*+?{]", plain):
        raise _wrong(
            f"has the pattern {quoted(pattern)}, but one may have up to {MAX_PATTERN} characters, one group, which is "
            "not repeated, and two of * + ? {"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise _wrong(f"has the pattern {pattern!r}, which is no regular expression: {error}") from None
