#!/usr/bin/env bash
# buildah.sh FOLDER ARGUMENT...: buildah over a storage of its own, which one `rm -r` takes away.
set -euo pipefail

folder=$1
shift
exec buildah --storage-driver vfs --root "$folder/storage" --runroot "$folder/run" "$@"
