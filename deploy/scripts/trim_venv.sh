#!/usr/bin/env bash
# trim_venv.sh VENV: removes files that only builds and tests of packages use. Afterwards nothing can
# be installed into, compiled in or linked against VENV.
set -euo pipefail

packages=("$1"/lib/python3.*/site-packages)
cd "${packages[0]}"
rm -rf torch/include torch/test torch/share pip pip-*.dist-info
# Only the shared-memory manager is used at run time.
find torch/bin -mindepth 1 -maxdepth 1 ! -name torch_shm_manager -exec rm -rf {} +
rm -f "$1"/bin/pip "$1"/bin/pip3*
