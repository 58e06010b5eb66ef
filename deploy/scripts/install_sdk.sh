#!/usr/bin/env bash
# install_sdk.sh VENV [PIP_CONFIG]: installs the RBLN SDK that pyproject.toml's extra `npu` names.
# PIP_CONFIG is a pip.conf with the vendor's index and the account's credentials; it is only read.
# What is locked stays: an SDK that wants another torch or vLLM fails the build instead.
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
# Without the hashes: with them pip would want one of every package of the SDK.
sed -e '/^#/d' -e '/^--/d' -e 's/ --hash=.*//' requirements/torch.txt requirements/cpu.lock >"$work/locked.txt"
if [ -n "$config" ]; then
    export PIP_CONFIG_FILE=$config
fi
# Not --quiet: that hides what a conflict is about. pip prints an index without its password.
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    --no-cache-dir --retries 2 --timeout 30 -r "$work/sdk.txt" -c "$work/locked.txt"
