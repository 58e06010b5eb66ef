#!/bin/sh
# The image's `vllm`, first in its PATH: manifests written for vLLM's image run `vllm serve MODEL`.
set -eu

umask 0002
case "${1:-}" in
    serve | --version) exec rbln-serve "$@" ;;
    *) exec python -m vllm.entrypoints.cli.main "$@" ;;
esac
