#!/usr/bin/env bash
# find_python.sh [VERSION]: prints the Python (default: 3.11) to build the environment with; $PYTHON, if
# set, is the only candidate.
set -euo pipefail

wanted=${1:-3.11}
for candidate in ${PYTHON:-python$wanted python3}; do
    found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    if [ "$found" = "$wanted" ] && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        command -v "$candidate"
        exit 0
    fi
    echo "$candidate is Python $found$([ "$found" != "$wanted" ] || echo ' without its venv module or ensurepip')." >&2
done
echo "Python $wanted with its venv module is needed (on Debian: python$wanted-venv)." >&2
echo "Install it, or name one: make install PYTHON=/path/to/python$wanted" >&2
exit 1
