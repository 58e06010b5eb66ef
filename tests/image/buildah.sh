#!/usr/bin/env bash
# buildah.sh FOLDER ARGUMENT...: buildah over a storage of its own, which one `rm -r` takes away.
# $BUILDAH_DRIVER names a storage driver: overlay is faster and smaller where mounts are allowed.
set -euo pipefail

folder=$1
shift
exec buildah --storage-driver "${BUILDAH_DRIVER:-vfs}" --root "$folder/storage" --runroot "$folder/run" "$@"
