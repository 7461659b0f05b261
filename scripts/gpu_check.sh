#!/usr/bin/env bash
# Nine minutes of a GPU: the table of speed and memory, then the tests of what runs on GPUs.
#   bash scripts/gpu_check.sh [FOLDER [SECONDS]]
# FOLDER (runs/gpu_check) gets environment.txt, table.md, tests.txt and errors.txt, each line as soon as it is known; all
# ends within SECONDS (530), of which the table has four sevenths, and a file of tests at most a fifth.
# Installs nothing and needs no network, MPI, webdataset, blobfile or ftfy: torch for CUDA and NEEDED are enough, pytest for
# the tests, diffusers for a row.
# Exit status: 0 = the table has been written to its end, and all tests have passed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/runs/gpu_check} total=${2:-530} status=0
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -f "$folder"/{environment.txt,table.md,tests.txt,errors.txt}
cd "$root"
[ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || . .venv/bin/activate
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# part TITLE FILE SECONDS COMMAND…: what the command prints in so many seconds, or until the end of all, is shown and
# added to a file of the folder; returns whether it ended well.
part() {
    local left=$((total - SECONDS)) result=0
    echo "[$SECONDS s] $1"
    { [ "$left" -gt 0 ] && timeout --kill-after 5 "$(($3 < left ? $3 : left))" "${@:4}"; } \
        2> >(tee -a "$folder/errors.txt" >&2) | tee -a "$folder/$2" || result=$?
    [ "$result" -ne 0 ] || return 0
    case $result-$left in
        124-* | 137-* | *--* | *-0) echo "$1: time is up" ;;
        *) echo "$1: status $result" ;;
    esac | tee -a "$folder/$2"
    status=1
    return 1
}

part "environment" environment.txt 120 python3 - <<'PYTHON' || exit 1
import importlib.metadata, platform, shutil, subprocess, sys

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"

NEEDED = ("numpy", "pillow", "pyyaml", "tqdm", "urllib3")
versions = {name: version(name) for name in ("torch", "triton", *NEEDED, "pytest", "diffusers")}
print(platform.platform(), f"Python {platform.python_version()}", *map(" ".join, versions.items()), sep="\n")
if missing := [name for name in ("torch", *NEEDED) if versions[name] == "missing"]:
    sys.exit(f"error: nothing can be checked without the packages {', '.join(missing)}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"error: there is nothing to check, because torch {torch.__version__} finds no CUDA device on this machine")
device = torch.cuda.get_device_properties(0)
print(f"{device.name}, {device.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}")
if shutil.which("nvidia-smi"):
    subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv"])
PYTHON

budget=$((total * 4 / 7))
part "table" table.md $((budget + 20)) python3 scripts/benchmark.py --benchmarks gpu --seconds "$budget" || true
if python3 -c "import pytest" 2>/dev/null; then
    for file in $(grep -lrE "^from waiting import .*\b(on_gpu|needs_cuda)\b" tests --include "test_*.py" | sort --reverse); do
        part "$file" tests.txt $((total / 5)) python3 -m pytest -q -m gpu --slow -rfE --durations 3 -p no:cacheprovider \
            -o faulthandler_timeout=60 "$file" || true
    done
else
    echo "The tests were not run: pytest is missing" | tee "$folder/tests.txt"
    status=1
fi
echo "[$SECONDS s] $([ "$status" -eq 0 ] && echo "All is well" || echo "Not all is well"): see $folder"
exit "$status"
