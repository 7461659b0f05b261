#!/usr/bin/env bash
# The whole job, small, on a fresh machine: data → training → pictures → scores. bash scripts/demo.sh [--quick True] …
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""  # "": else it would see our arguments
exec python scripts/demo.py "$@"
