"""How both pages look: gradio's theme, and what it has no option for."""

from __future__ import annotations

from typing import Any

from .uploads import load_gradio

# The bar has the color of the theme's button, over a track that stays pale.
CSS = """
progress { appearance: none; width: 100%; height: 8px; border: none; border-radius: 4px; overflow: hidden; }
progress, progress::-webkit-progress-bar { background: var(--border-color-primary); }
progress::-webkit-progress-value { background: var(--button-primary-background-fill); }
progress::-moz-progress-bar { background: var(--button-primary-background-fill); }
"""


def theme() -> Any:
    # Fonts of the machine that shows the page: nothing is fetched from elsewhere.
    made = load_gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    # Colors with enough contrast for WCAG's level AA, which gradio's own miss.
    dark = {"button_primary_background_fill": "*primary_700", "button_primary_background_fill_hover": "*primary_800"}
    made.set(
        **dark,
        **{f"{name}_dark": color for name, color in dark.items()},
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
    )
    return made
