#!/bin/sh
# The image's command: rbln-serve. Without one of its commands as first argument, it serves MODEL. A link to
# it is the image's `vllm`, because manifests written for vLLM's image run `vllm serve MODEL`.
set -eu

# Files in volumes are group-writable: the next container may have another user id.
umask 0002
[ "${0##*/}" != vllm ] || set -- vllm "$@"
case "${1:-} ${2:-}" in
    "vllm serve" | "vllm --version") shift && exec rbln-serve "$@" ;;
    vllm\ *) shift && exec python -m vllm.entrypoints.cli.main "$@" ;;
    # The image's HF_HUB_OFFLINE is for servers; without a network: `fetch --offline`.
    fetch\ *) HF_HUB_OFFLINE=0 exec rbln-serve "$@" ;;
    serve\ * | batch\ * | check\ * | compile\ * | cache\ * | tune\ * | parity\ * | collect-env\ * | \
        --help\ * | -h\ * | --version\ *) exec rbln-serve "$@" ;;
    *) exec rbln-serve serve "$@" ;;
esac
