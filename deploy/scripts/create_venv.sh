#!/usr/bin/env bash
# create_venv.sh VENV [VERSION]: creates a virtual environment of Python 3.11, or VERSION, with pip. $PYTHON
# may name the Python.
set -euo pipefail

venv=$1
scripts=$(dirname "$0")
python=$("$scripts/find_python.sh" ${2:+"$2"})
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
else
    # A failed download removes the environment, so the next call starts again.
    trap 'rm -rf "$venv"' ERR
    "$python" -m venv --without-pip "$venv"
    "$python" "$scripts/fetch_pip.py" "$venv" "$scripts/../../requirements/pip.txt"
fi
