# Sourced by demo.sh, test.sh and .ci/run: install the project with pinned versions into a virtual environment, once.
# The active environment is used if there is one; otherwise .venv in the checkout is created with a python3 >= 3.10.
# First argument: the extras to install, e.g. "[test]"; "" for none.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

if [ -z "${VIRTUAL_ENV:-}" ]; then
    unfinished=.venv/.diff_dalle-unfinished # is there while the environment is being created
    if [ -e "$unfinished" ]; then
        echo "Removing .venv, whose creation was interrupted"
        rm -rf .venv
    fi
    if [ ! -x .venv/bin/python ]; then
        for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
            if command -v "$candidate" >/dev/null && is_recent "$candidate"; then python=$candidate; break; fi
        done
        [ -n "${python:-}" ] || { echo "error: Python 3.10 or later is required, but no python3 of that version was found" >&2; exit 1; }
        echo "Creating a virtual environment in .venv with $("$python" --version)"
        mkdir -p .venv && touch "$unfinished"
        "$python" -m venv .venv || { rm -rf .venv; echo "error: python's venv module is missing (Debian: apt install python3-venv)" >&2; exit 1; }
        rm "$unfinished"
    fi
    . .venv/bin/activate
fi

# The stamp records the checkout and the requirements that were installed, so that later starts skip pip.
requirements="$PWD $(cat setup.py scripts/constraints.txt | cksum)"
stamp="$VIRTUAL_ENV/.diff_dalle-installed${1:-}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$requirements" ]; then
    echo "Installing diff_dalle${1:-} and its dependencies into $VIRTUAL_ENV (a few minutes, depending on the network)"
    python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt --editable ".${1:-}"
    printf '%s' "$requirements" > "$stamp"
fi
