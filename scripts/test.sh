#!/usr/bin/env bash
# Run the tests in parallel, three processes for two cores: bash scripts/test.sh [pytest arguments]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "[test]"
# Three for two: tests of several processes, of servers and of kills wait a third of their time.
processes=$(($(getconf _NPROCESSORS_ONLN) * 3 / 2))
# worksteal: contiguous halves, so that a file's fixtures are built in one process; idle processes take over the rest.
exec python -m pytest --numprocesses "$((processes < 8 ? processes : 8))" --dist worksteal "$@"
