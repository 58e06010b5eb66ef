#!/usr/bin/env bash
# build_payload.sh VENV MODEL_DIR BUNDLE: installs this project into VENV, builds its kernels for
# all levels of x86-64 CPU into BUNDLE, and copies the default model to MODEL_DIR.
set -euo pipefail

venv=$1
model=$2
bundle=$3
"$(dirname "$0")/install_project.sh" "$venv"
# CPUs without AVX2 run PyTorch's operators.
"$venv/bin/python" -m rbln_backend.emulator.variants --into "$bundle" --variants amx_bf16 avx512_bf16 avx512 avx2
cp -R "$venv/share/rbln-serve/default-model" "$model"
