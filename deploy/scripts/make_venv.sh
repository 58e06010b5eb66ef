#!/usr/bin/env bash
# make_venv.sh VENV FILE...: creates a virtual environment with exactly the packages of the files.
set -euo pipefail

venv=$1
scripts=$(dirname "$0")
"$scripts/create_venv.sh" "$venv"
# An image keeps no downloads.
PIP_NO_CACHE_DIR=1 "$scripts/install_locked.sh" "$@"
