#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel; installs the wheel into an empty environment outside the checkout and
# trains one step there. $1 is a Python that has `build` and `setuptools`.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
builder=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$builder" -m build --no-isolation --outdir "$scratch/dist" "$checkout" >"$scratch/build.log" 2>&1 ||
    { cat "$scratch/build.log"; exit 1; }
wheel=("$scratch"/dist/*.whl)

# The wheel holds what the links show, and nothing besides its own metadata.
diff <(cd "$checkout" && find -L lohan_fx -type f -not -path '*/__pycache__/*' | sort) \
    <("$builder" -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' "${wheel[0]}" |
        grep -v '^lohan_fx-[^/]*\.dist-info/' | sort) ||
    { echo "wheel_check: the wheel (>) differs from the tree (<)" >&2; exit 1; }

"$builder" -m venv --without-pip "$scratch/venv" # which a Debian without python3-venv cannot give it
pip=("$builder" -m pip --python "$scratch/venv/bin/python" install -q --no-compile -c "$checkout/constraints.txt")
"${pip[@]}" torch==2.13.0
"${pip[@]}" "${wheel[0]}"

cd "$scratch"
venv/bin/python -I "$checkout/tests/wheel_smoke.py"
