#!/usr/bin/env bash
# install_project.sh VENV [-e]: installs this project (editable with -e) and the vllm metadata.
set -euo pipefail

venv=$1
editable=${2:-}
cd "$(dirname "$0")/../.."
# shellcheck disable=SC2086 # an empty $editable must vanish
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
    --no-build-isolation --no-index ./deploy/vllm-metadata $editable .
