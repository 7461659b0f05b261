"""Put the present flags of the training commands and the presets' costs into the README, between their marks."""

import re
from pathlib import Path

from diff_dalle.commands.command_line import flag_table
from diff_dalle.commands.info import preset_table
from diff_dalle.commands.train_classifier import ClassifierRun
from diff_dalle.commands.train_generator import GeneratorRun

TABLES = {
    "flags": flag_table(GeneratorRun),
    "classifier flags": flag_table(ClassifierRun, known=GeneratorRun),
    "presets": preset_table(),
}


def main():
    path = Path(__file__).parent.parent / "README.md"
    text = path.read_text(encoding="utf-8")
    for mark, table in TABLES.items():
        block = f"<!-- {mark} -->\n\n{table}\n<!-- /{mark} -->"
        text = re.sub(rf"<!-- {mark} -->.*<!-- /{mark} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
