"""Text-to-image diffusion models, trained from scratch.

``diff_dalle.load("ema.pt").sample(["a red circle"])`` generates images from a checkpoint, or from a bundled model by
its name (``diff_dalle.models()``). The diffusion process and its enumerations have Guided-Diffusion's names and
numbers. Names are imported when they are first used, from where ``__init__.pyi`` says.
"""

import ast
from importlib import import_module
from pathlib import Path

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME_OF = {
    each.name: f".{node.module}"
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.level
    for each in node.names
}

__version__ = "0.1.0"
__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name == "models":  # a package that can be called
        return import_module(".models", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'diff_dalle' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
