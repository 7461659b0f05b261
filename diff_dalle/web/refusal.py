"""Why a request is refused: an InputError says what is wrong with it, a Refusal why it is not served although it may be
right."""

from __future__ import annotations

from ..config import InputError


class Refusal(InputError):
    """A request that is not served; ``status`` is that of HTTP. Any other InputError about a request has 400."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status
