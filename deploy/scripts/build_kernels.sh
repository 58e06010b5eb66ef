#!/usr/bin/env bash
# build_kernels.sh VENV: builds this CPU's kernels into the cache for the first start. VENV needs only
# torch. If the build fails, the first start reports the reason and the fallback.
set -euo pipefail

venv=$1
cd "$(dirname "$0")/../.."
"$venv/bin/python" -m rbln_backend.emulator.variants \
    --into "${VLLM_CACHE_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm}" --variants native ||
    echo "the kernels were not built ahead" >&2
