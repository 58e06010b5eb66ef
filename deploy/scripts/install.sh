#!/usr/bin/env bash
# install.sh VENV [FILE...]: creates VENV if it does not exist, with $PYTHON or the first of Python 3.11, 3.12
# and 3.13, and installs each FILE into it: of a requirements file exactly the wheels with its hashes, from
# any index; of `make wheel` the wheel alone, after requirements/torch.txt and requirements/cpu.lock.
# $INVALIDATION is an invalidation mode of compileall.
set -euo pipefail

venv=$1
shift
here=$(dirname "$0")

find_python() {
    local candidate version
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
            3.11 | 3.12 | 3.13)
                if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                    echo "$candidate"
                    return
                fi
                echo "$candidate is Python $version without its venv module or ensurepip." >&2
                ;;
            *) echo "$candidate is Python $version." >&2 ;;
        esac
    done
    echo "Python 3.11, 3.12 or 3.13 with its venv module is needed (on Debian: python3-venv)." >&2
    echo "Install it, or name one: make install PYTHON=/path/to/python3.12" >&2
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps)
for file in "$@"; do
    case $file in
        # Only this project's files: nothing is fetched to build or to complete them.
        *.whl) "${pip[@]}" --no-build-isolation --no-index "$here/../vllm-metadata" "$file" ;;
        # Two tries and 30 s: an unreachable extra index must not delay an installation from another one.
        # Byte code is compiled below, on all cores.
        *) "${pip[@]}" --progress-bar off --require-hashes --only-binary :all: --no-compile \
            --retries 2 --timeout 30 -r "$file" ;;
    esac
done
[ $# = 0 ] || "$venv/bin/python" -m compileall -q -j 0 ${INVALIDATION:+--invalidation-mode "$INVALIDATION"} \
    "$venv/lib" >/dev/null || true # some packages ship templates
