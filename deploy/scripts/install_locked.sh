#!/usr/bin/env bash
# install_locked.sh VENV FILE...: installs exactly the wheels with the hashes of the requirements
# files into VENV, from any index. $INVALIDATION is an invalidation mode of compileall.
set -euo pipefail

venv=$1
shift
for file in "$@"; do
    # Two tries and 30 s: an unreachable extra index must not delay an installation from another one.
    # Byte code is compiled below, on all cores.
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --progress-bar off \
        --require-hashes --only-binary :all: --no-deps --no-compile --retries 2 --timeout 30 -r "$file"
done
"$venv/bin/python" -m compileall -q -j 0 ${INVALIDATION:+--invalidation-mode "$INVALIDATION"} \
    "$venv/lib" >/dev/null || true # some packages ship templates
