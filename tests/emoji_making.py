"""A small emoji world without a font."""

from PIL import Image

from diff_dalle.worlds.emoji import font, world
from diff_dalle.worlds.emoji.names import ADULT, TONES, WHO, Emoji


def people(count: int) -> list[Emoji]:
    """``count`` occupations of all of WHO in all skin tones, and adults without one."""
    whats = [f"{ADULT}\u200d{chr(0x1F300 + i)}" for i in range(count)] + [ADULT]
    return [
        Emoji(f"{who}{what}{chr(0x1F3FB + k)}", f"{who} {i} {tone}", who, what, (tone,))
        for i, what in enumerate(whats)
        for who in WHO
        for k, tone in enumerate(TONES)
    ]


class Painter:
    """In place of the font: a patch of the skin tone on a ground that says the rest. It has no rocket."""

    def __init__(self, path: str = ""):
        self.identity = path

    def draw(self, text: str) -> Image.Image | None:
        if text == "\U0001f680":
            return None
        tone = next((i for i in range(5) if chr(0x1F3FB + i) in text), 5)
        picture = Image.new("RGB", (40, 40), (20, len(text) % 251, sum(map(ord, text)) % 251))
        picture.paste((250 - 30 * tone, 200 - 30 * tone, 180 - 30 * tone), (4, 4, 24, 30))
        return picture

    distinct = font.Renderer.distinct


def use_painter(monkeypatch, emoji: list[Emoji]) -> None:
    """Have ``EmojiWorld`` draw these emoji with the painter."""
    monkeypatch.setattr(world, "Renderer", Painter)
    monkeypatch.setattr(world, "find_font", str)
    monkeypatch.setattr(world, "recommended", lambda: emoji)
    monkeypatch.setattr(world, "names_version", lambda: "2.0")
