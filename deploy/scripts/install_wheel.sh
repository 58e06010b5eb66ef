#!/usr/bin/env bash
# install_wheel.sh VENV WHEEL: creates VENV with Python 3.11, the locked packages and a wheel of
# `make wheel`. Needs no compiler.
set -euo pipefail

venv=$1
wheel=$2
scripts=$(dirname "$0")
[ -x "$venv/bin/python" ] || "$scripts/create_venv.sh" "$venv"
"$scripts/install_locked.sh" "$venv" "$scripts"/../../requirements/{torch.txt,cpu.lock}
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
    --no-build-isolation --no-index "$scripts/../vllm-metadata" "$wheel"
