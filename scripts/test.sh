#!/usr/bin/env bash
# Run the tests in a fresh environment: bash scripts/test.sh [pytest arguments]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "[test]"
exec python -m pytest tests "$@"
