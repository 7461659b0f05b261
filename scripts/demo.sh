#!/usr/bin/env bash
# The whole pipeline at small scale on a fresh machine: data, training, images, scores. bash scripts/demo.sh [--quick]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "[plot,emoji]"
exec python scripts/demo.py "$@"
