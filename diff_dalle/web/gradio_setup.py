"""What both pages need of gradio: the package, its look, and the folder of the pictures that visitors upload and are
shown, of this process alone and bounded."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import InputError

BLOCK = 1 << 14  # bytes that a smaller file counts as: it takes a block of the disk, and time to look at

# The bar has the color of the theme's button, over a track that stays pale.
CSS = """
progress { appearance: none; width: 100%; height: 8px; border: none; border-radius: 4px; overflow: hidden; }
progress, progress::-webkit-progress-bar { background: var(--border-color-primary); }
progress::-webkit-progress-value { background: var(--button-primary-background-fill); }
progress::-moz-progress-bar { background: var(--button-primary-background-fill); }
"""


def load_gradio() -> Any:
    """The package. InputError if it is missing."""
    warnings.filterwarnings("ignore", module="gradio")  # of others that it uses, which concern no user
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read at its import; it would report its use
    try:
        import gradio
    except ImportError as error:
        raise InputError(
            f"the page requires gradio, which is not installed ({error}): pip install 'diff_dalle[web]'"
        ) from None
    return gradio


@functools.cache
def uploads_folder() -> str:
    """Where gradio keeps files. It serves all that is there, and the oldest are deleted, so nobody else may use it."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="diff_dalle_", dir=os.environ.get("GRADIO_TEMP_DIR")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = folder
    return folder


def holds(folder: str, path: str) -> bool:
    """Whether a file is in a folder, wherever links lead to."""
    return "\0" not in path and os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)


def keep(files: Mapping[str, bytes]) -> list[str]:
    """Paths of files with these names in the folder, written unless they are there."""
    paths = []
    for name, data in files.items():
        path = Path(uploads_folder(), hashlib.sha256(data).hexdigest(), name)
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path.touch()  # not among the oldest any more
        else:
            path.write_bytes(data)
        paths.append(str(path))
    return paths


def make_room(folder: str, most: int) -> None:
    """Delete the oldest files in a folder until at most ``most`` bytes are left."""
    found = []
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if not path.is_dir():
                about = path.lstat()
                found.append((about.st_mtime, max(about.st_size, BLOCK), path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            break
        total -= size
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            if path.parent != Path(folder):
                path.parent.rmdir()


def appearance(css: str) -> dict[str, Any]:
    """How a page looks, as gradio's arguments. css: the page's own."""
    # Fonts of the machine that shows the page: nothing is fetched from elsewhere.
    theme = load_gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    # Colors with enough contrast for WCAG's level AA, which gradio's own miss.
    dark = {"button_primary_background_fill": "*primary_700", "button_primary_background_fill_hover": "*primary_800"}
    theme.set(
        **dark,
        **{f"{name}_dark": color for name, color in dark.items()},
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
    )
    return {"theme": theme, "css": CSS + css, "footer_links": [], "ssr_mode": False}
