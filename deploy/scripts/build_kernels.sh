#!/usr/bin/env bash
# build_kernels.sh VENV: builds the kernels for this CPU where the first start looks for them, so that
# it need not. VENV needs torch alone. Where they cannot be built, that start says why, and what runs.
set -euo pipefail

venv=$1
cd "$(dirname "$0")/../.."
"$venv/bin/python" -m rbln_backend.emulator.variants \
    --into "${VLLM_CACHE_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm}" --variants native ||
    echo "the kernels were not built ahead" >&2
