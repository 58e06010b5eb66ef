#!/usr/bin/env bash
# install_sdk.sh VENV [PIP_CONFIG]: installs the RBLN SDK of pyproject.toml's extra `npu`.
# PIP_CONFIG is a pip.conf with the vendor's index and the account's credentials; it is only read.
# Locked packages stay: an SDK that needs another torch or vLLM fails the build.
set -euo pipefail

venv=$1
config=${2:-}
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" - >"$work/sdk.txt" <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["npu"]))
PYTHON
# Without hashes: with them pip would require one for every package of the SDK.
sed -e '/^#/d' -e '/^--/d' -e 's/ --hash=.*//' requirements/torch.txt requirements/cpu.lock >"$work/locked.txt"
if [ -n "$config" ]; then
    export PIP_CONFIG_FILE=$config
fi
# Not --quiet, which hides the details of a conflict. pip prints an index without its password.
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    --no-cache-dir --retries 2 --timeout 30 -r "$work/sdk.txt" -c "$work/locked.txt"
