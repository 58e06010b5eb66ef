#!/usr/bin/env bash
# build_bundle.sh VENV BUNDLE: builds the kernels for all levels of x86-64 CPU into BUNDLE.
set -euo pipefail

venv=$1
bundle=$2
cd "$(dirname "$0")/../.."
# CPUs without AVX2 run PyTorch's operators.
"$venv/bin/python" -m rbln_backend.emulator.variants --into "$bundle" \
    --variants avx512_bf16 avx512 avx2
deploy/scripts/settle_times.sh "$bundle"
