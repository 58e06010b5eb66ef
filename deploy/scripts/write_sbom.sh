#!/usr/bin/env bash
# write_sbom.sh VENV OUT [DPKG_STATUS]: writes what VENV, and a system with that list of Debian
# packages, is made of to OUT: CycloneDX JSON.
set -euo pipefail

venv=$1
out=$2
status=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
requirements=$here/../../requirements
# -I: the environment itself, without what a variable or a folder adds to it.
exec "$venv/bin/python" -I "$here/write_sbom.py" "$out" \
    "$requirements/torch.txt" "$requirements"/*.lock ${status:+--dpkg-status "$status"}
