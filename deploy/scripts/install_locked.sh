#!/usr/bin/env bash
# install_locked.sh VENV FILE...: installs exactly what the requirements files list into VENV: the
# wheels that have the listed hashes, wherever they come from, and no others.
set -euo pipefail

venv=$1
shift
for file in "$@"; do
    # Two tries and 30 s: an extra index that cannot be reached must not hold up a machine that has
    # the wheel in another one. Byte code is compiled below, on every core.
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --progress-bar off \
        --require-hashes --only-binary :all: --no-deps --no-compile --retries 2 --timeout 30 -r "$file"
done
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null || true # some packages ship templates
