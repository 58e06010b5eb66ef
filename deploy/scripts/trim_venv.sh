#!/usr/bin/env bash
# trim_venv.sh VENV: removes what only builds and tests of packages use. Nothing is installed into,
# compiled in or linked against VENV afterwards.
set -euo pipefail

packages=("$1"/lib/python3.*/site-packages)
cd "${packages[0]}"
rm -rf torch/include torch/test torch/share pip pip-*.dist-info
# The shared-memory manager alone is started at run time.
find torch/bin -mindepth 1 -maxdepth 1 ! -name torch_shm_manager -exec rm -rf {} +
rm -f "$1"/bin/pip "$1"/bin/pip3*
