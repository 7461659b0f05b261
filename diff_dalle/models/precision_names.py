"""The names of precisions; ``precision.py`` says what they do."""

from __future__ import annotations

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
