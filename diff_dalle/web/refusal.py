"""Why a request is refused: one sentence, and the HTTP status that goes with it."""

from __future__ import annotations


class Refusal(Exception):
    """A request that is not served; ``sentence`` says why, ``status`` is that of HTTP."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
