#!/usr/bin/env bash
# write_sbom.sh VENV OUT [DPKG_STATUS]: writes a CycloneDX bill of materials of VENV, and of that list
# of Debian packages, to OUT.
set -euo pipefail

venv=$1
out=$2
status=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
requirements=$here/../../requirements
# -I: without additions from variables or folders.
exec "$venv/bin/python" -I "$here/write_sbom.py" "$out" \
    "$requirements/torch.txt" "$requirements"/*.lock ${status:+--dpkg-status "$status"}
