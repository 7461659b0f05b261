"""API and page on one address."""

from __future__ import annotations

import os
from typing import Any

from ..commands.serve import AddressConfig
from ..errors import InputError
from .api import Service, create_app


def check_installed() -> None:
    """InputError if the extra ``web`` is missing."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported; it would report its use
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise InputError('the page needs gradio, which is missing: pip install -e ".[web]"') from None


def whole_app(service: Service) -> Any:
    """The API with the page at "/", an ASGI application. InputError as ``check_installed``."""
    check_installed()
    import gradio

    from .page import CSS, build_page

    # Fonts of the machine that shows the page: nothing is fetched from elsewhere.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    # Colors with enough contrast for WCAG's level AA, which gradio's own miss.
    dark = {"button_primary_background_fill": "*primary_700", "button_primary_background_fill_hover": "*primary_800"}
    theme.set(
        **dark,
        **{f"{name}_dark": color for name, color in dark.items()},
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
    )
    return gradio.mount_gradio_app(
        create_app(service),
        build_page(service),
        path="",
        theme=theme,
        css=CSS,
        max_file_size=service.limits.body_bytes,
        footer_links=[],
        ssr_mode=False,
    )


def serve(service: Service, address: AddressConfig) -> None:
    """Serve until interrupted."""
    import uvicorn

    print(f"http://{address.host}:{address.port}", flush=True)
    try:
        uvicorn.run(whole_app(service), host=address.host, port=address.port, log_level="warning")
    finally:
        service.worker.close()
