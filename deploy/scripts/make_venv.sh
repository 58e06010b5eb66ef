#!/usr/bin/env bash
# make_venv.sh VENV PREFIX FILE...: creates a virtual environment with exactly the packages of the
# files. Its Python also imports what is installed below PREFIX.
set -euo pipefail

venv=$1
prefix=$2
shift 2
scripts=$(dirname "$0")
"$scripts/create_venv.sh" "$venv"
for packages in "$venv"/lib/python3.*/site-packages; do
    echo "$prefix/lib/$(basename "$(dirname "$packages")")/site-packages" >"$packages/rbln-serve.pth"
done
# An image keeps no downloads, and its files never change: byte code need not be compared with them.
PIP_NO_CACHE_DIR=1 INVALIDATION=unchecked-hash "$scripts/install_locked.sh" "$venv" "$@"
