#!/usr/bin/env bash
# trim_image.sh VENV: removes what the image's server never loads. Afterwards nothing can be compiled in or
# linked against VENV, and vLLM's own CPU platform does not run there.
set -euo pipefail

packages=("$1"/lib/python3.*/site-packages)
venv=$(cd "$1" && pwd)
cd "${packages[0]}"
rm -rf torch/include torch/test torch/share
# Only the shared-memory manager is used at run time.
find torch/bin -mindepth 1 -maxdepth 1 ! -name torch_shm_manager -exec rm -rf {} +
# Kernels of vLLM's CPU platform: RblnPlatform.import_kernels imports none.
rm -f vllm/_C*.so
# Symbols for debuggers. Only large libraries: stripping breaks some that were patched for wheels.
for library in torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so uvloop/loop.*.so; do
    [ ! -e "$library" ] || strip --strip-unneeded "$library"
done
# The same files make the same layer, whenever they are installed.
find "$venv" -exec touch --no-dereference --date=@0 {} +
