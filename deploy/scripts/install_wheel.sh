#!/usr/bin/env bash
# install_wheel.sh VENV WHEEL [VERSION]: creates VENV with Python 3.11, or VERSION (3.12, 3.13), the packages
# that are locked for it, and a wheel of `make wheel`. An existing VENV keeps its Python. Needs no compiler.
set -euo pipefail

venv=$1
wheel=$2
scripts=$(dirname "$0")
[ -x "$venv/bin/python" ] || "$scripts/create_venv.sh" "$venv" "${3:-3.11}"
version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
locks=$scripts/../../requirements
[ "$version" = 3.11 ] || locks+=/python$version
"$scripts/install_locked.sh" "$venv" "$locks/torch.txt" "$locks/cpu.lock"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
    --no-build-isolation --no-index "$scripts/../vllm-metadata" "$wheel"
