# Sourced by demo.sh and test.sh: the project in a virtual environment, installed once, with the pinned versions.
# An environment that is active is used as it is; otherwise .venv in the checkout is made with a python3 >= 3.10.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
        for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
            if command -v "$candidate" >/dev/null && is_recent "$candidate"; then python=$candidate; break; fi
        done
        [ -n "${python:-}" ] || { echo "error: no python3 of version 3.10 or later was found" >&2; exit 1; }
        echo "Making a virtual environment in .venv with $("$python" --version)"
        "$python" -m venv .venv || { echo "error: python's venv module is missing (Debian: apt install python3-venv)" >&2; exit 1; }
    fi
    . .venv/bin/activate
fi

# The stamp holds what was installed and from where, so that a second start does not wait for pip again.
wanted="$PWD $(cat setup.py scripts/constraints.txt | cksum)"
stamp="$VIRTUAL_ENV/.diff_dalle-installed${1:-}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing diff_dalle and its dependencies into $VIRTUAL_ENV (a minute or a few, depending on the network)"
    python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt --editable ".${1:-}"
    printf '%s' "$wanted" > "$stamp"
fi
