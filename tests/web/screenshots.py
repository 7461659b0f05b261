"""Pictures of the page after a sample, at the width of a desktop and of a phone. Usage, against a running server:

python tests/web/screenshots.py ADDRESS FOLDER [PROMPT]

such as ``python tests/web/screenshots.py http://127.0.0.1:7860 /tmp "a red circle"``: writes desktop.png (1280 pixels
wide) and phone.png (390). Needs chromium and playwright (the extra test).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
WAIT = 300_000  # ms for a sample, on a busy machine


def take(address: str, folder: str, prompt: str = "a red circle") -> list[Path]:
    """Sample at each width. Returns the paths of the pictures."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        sys.exit("there is no browser: apt-get install chromium")
    paths = []
    with sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for name, (width, height) in WIDTHS.items():
            page = window.new_page(viewport={"width": width, "height": height})
            page.goto(address)
            page.get_by_label("Prompt", exact=True).fill(prompt)
            page.get_by_role("button", name="Sample", exact=True).click()
            page.get_by_text("Done in").wait_for(timeout=WAIT)
            page.get_by_role("button", name="Repeat these images").click()
            page.get_by_text("diff-dalle sample").wait_for()
            page.wait_for_timeout(500)  # for what opens slowly
            paths.append(Path(folder, f"{name}.png"))
            page.screenshot(path=paths[-1], full_page=True)
            page.close()
    return paths


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    print(*take(*sys.argv[1:]), sep="\n")
