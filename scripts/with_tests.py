"""Imported by ``drill.py`` and ``benchmark.py``, most of which is in ``tests/``: a checkout has it, a wheel has not."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
if not TESTS.is_dir():
    sys.exit(f"error: this command is part of the tests, but {TESTS} does not exist: clone the repository")
sys.path.insert(1, str(TESTS))  # after the folder of the scripts
