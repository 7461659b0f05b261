#!/usr/bin/env bash
# Run the tests in parallel, in as many processes as tests/conftest.py says: bash scripts/test.sh [--slow] [pytest arguments]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "[test]"
# worksteal: contiguous halves, so that a file's fixtures are built in one process; idle processes take over the rest.
exec python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal "$@"
