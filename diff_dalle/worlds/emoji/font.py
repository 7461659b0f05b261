"""The color font: found, and rendered onto white."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, features

from ...config import Fault, InputError, named
from .names import Emoji

FONT = "NotoColorEmoji.ttf"
FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/Library/Fonts",
    "~/Library/Fonts",
    "/opt/homebrew/share/fonts",
)
_STRIKE = 109  # pixels per em of the font's only size of bitmaps
_WIDE = 1.2  # widths of one emoji, above which a sequence is drawn as several


def find_font(path: str = "") -> str:
    """The path of the font: ``path``, or Noto's in the usual folders. InputError where there is none."""
    if path:
        if not Path(path).is_file():
            raise InputError(Fault("font", "must be a file", path))
        return path
    for folder in FOLDERS:
        for found in sorted(Path(os.path.expanduser(folder)).rglob(FONT)):
            return str(found)
    raise InputError(
        f"{FONT} is in none of {', '.join(FOLDERS)}: install it (Debian and Ubuntu: apt install "
        f"fonts-noto-color-emoji), or give the path of a font of color bitmaps as {named('font')}"
    )


class Renderer:
    """Draws emoji of a font of color bitmaps.

    ``identity`` tells fonts apart, by their content. Raises InputError for a file that is no such font, and for a
    Pillow that cannot join sequences.
    """

    def __init__(self, path: str):
        if not features.check("raqm"):
            raise InputError("Pillow cannot join emoji without libraqm: install Pillow from PyPI, whose wheels have it")
        try:
            # Opened here: Pillow would take another font of this name, from the system's folders, for a damaged one.
            content = Path(path).read_bytes()
            self._font = ImageFont.truetype(io.BytesIO(content), _STRIKE)
        except OSError as error:
            rule = f"must be a font of color bitmaps of {_STRIKE} pixels, such as {FONT}: {error}"
            raise InputError(Fault("font", rule, path)) from error
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"
        left, top, right, bottom = self._font.getbbox("\U0001f600")
        self._box = (int(right - left), int(bottom - top))

    def draw(self, sequence: str) -> Image.Image | None:
        """RGB on white, square; None for what the font does not have as one picture."""
        width, height = self._box
        if self._font.getlength(sequence) > _WIDE * width:
            return None
        side = max(self._box)
        picture = Image.new("RGBA", (side, side), (255, 255, 255, 0))
        corner = ((side - width) // 2, (side - height) // 2)
        ImageDraw.Draw(picture).text(corner, sequence, font=self._font, embedded_color=True)
        if picture.getchannel("A").getbbox() is None:
            return None
        flat = Image.new("RGB", picture.size, "white")
        flat.paste(picture, mask=picture.getchannel("A"))
        return flat

    def distinct(self, emoji: Iterable[Emoji]) -> Iterator[tuple[Emoji, Image.Image]]:
        """Those that the font has, each picture once: of several with the same, the first."""
        seen = set[bytes]()
        for each in emoji:
            picture = self.draw(each.sequence)
            if picture is not None and (content := picture.tobytes()) not in seen:
                seen.add(content)
                yield each, picture


def square_of(picture: Image.Image, size: int) -> Image.Image:
    """A square picture of ``size`` pixels a side."""
    return picture.resize((size, size), Image.Resampling.LANCZOS)
