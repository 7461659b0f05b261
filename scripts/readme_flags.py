"""Put the present flags of train_generator.py into the README, between its two marks."""

import re
from pathlib import Path

from diff_dalle.command_line import flag_table
from diff_dalle.tasks.generator_run import GeneratorRun


def main():
    path = Path(__file__).parent.parent / "README.md"
    table = f"<!-- flags -->\n\n{flag_table(GeneratorRun)}\n<!-- /flags -->"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(r"<!-- flags -->.*<!-- /flags -->", lambda _: table, text, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
