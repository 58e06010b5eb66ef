#!/bin/sh
# The image's command: rbln-serve. Without one of its commands as first argument, it serves MODEL.
set -eu

# Files in volumes are group-writable: the next container may have another user id.
umask 0002
case "${1:-}" in
    serve | batch | check | compile | fetch | cache | tune | --help | -h | --version) exec rbln-serve "$@" ;;
    *) exec rbln-serve serve "$@" ;;
esac
