#!/usr/bin/env bash
# create_venv.sh VENV [VERSION]: creates a virtual environment of Python 3.11, or VERSION, with pip. $PYTHON
# may name the Python.
set -euo pipefail

venv=$1
python=$("$(dirname "$0")/find_python.sh" ${2:+"$2"})
"$python" -m venv "$venv"
