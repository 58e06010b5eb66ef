#!/usr/bin/env bash
# install_prefix.sh VENV PREFIX MODEL_DIR: installs this project and the vllm metadata into PREFIX,
# which the Python of VENV searches (make_venv.sh), the command `vllm serve` beside rbln-serve, and
# the default model into MODEL_DIR.
set -euo pipefail

venv=$1
prefix=$2
model=$3
cd "$(dirname "$0")/../.."
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-compile \
    --no-build-isolation --no-index --ignore-installed --prefix "$prefix" ./deploy/vllm-metadata .
install -m 755 deploy/scripts/vllm.sh "$prefix/bin/vllm"
mv "$prefix/share/rbln-serve/default-model" "$model"
rmdir "$prefix/share/rbln-serve" "$prefix/share"
"$venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$prefix/lib"
deploy/scripts/settle_times.sh "$prefix" "$model"
