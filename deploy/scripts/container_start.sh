#!/bin/sh
# The image's command: rbln-serve. Without one of its commands as first argument, it serves MODEL.
set -eu

# Files in volumes are group-writable: the next container may have another user id.
umask 0002
case "${1:-}" in
    # The image's HF_HUB_OFFLINE is for servers; without a network: `fetch --offline`.
    fetch) HF_HUB_OFFLINE=0 exec rbln-serve "$@" ;;
    serve | batch | check | compile | cache | tune | parity | collect-env | \
        --help | -h | --version) exec rbln-serve "$@" ;;
    vllm) exec "$@" ;;
    *) exec rbln-serve serve "$@" ;;
esac
