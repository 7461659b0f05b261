"""Write the generated documentation: ``scripts/README.md``, and the table in ``diff_dalle/presets/README.md``."""

import argparse
import re
from pathlib import Path

import help_without_torch  # noqa: F401

from diff_dalle.commands.examples import command_page, scripts_in_order
from diff_dalle.commands.info import preset_table

SCRIPTS = Path(__file__).parent
PRESETS = SCRIPTS.parent / "diff_dalle" / "presets" / "README.md"


def pages() -> dict[Path, str]:
    """The content of each file that is generated or has a generated part."""
    pattern = "(?s)(<!-- presets -->).*(<!-- /presets -->)"
    presets = re.sub(pattern, lambda found: f"{found[1]}\n\n{preset_table()}\n{found[2]}", PRESETS.read_text("utf-8"))
    return {SCRIPTS / "README.md": command_page(scripts_in_order()), PRESETS: presets}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
