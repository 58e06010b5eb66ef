#!/bin/sh
# The image's command: rbln-serve. Without the name of one of its commands, MODEL is served.
set -eu

# Files in the volumes are for the group: the next container's user id may be another one.
umask 0002
case "${1:-}" in
    serve | batch | check | compile | fetch | cache | tune | --help | -h | --version) exec rbln-serve "$@" ;;
    *) exec rbln-serve serve "$@" ;;
esac
