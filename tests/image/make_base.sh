#!/usr/bin/env bash
# make_base.sh FOLDER TAG: a base image for the Dockerfile where no registry can be reached: Debian
# bookworm from Debian's own archive with its Python 3.11, in buildah's storage below FOLDER.
# Needs root, debootstrap and buildah; does nothing if the image is there.
set -euo pipefail

folder=$1
tag=$2
buildah=("$(dirname "$0")/buildah.sh" "$folder")
if "${buildah[@]}" inspect --type image "$tag" >/dev/null 2>&1; then
    exit 0
fi
root=$folder/base
rm -rf "$root"
nice debootstrap --variant=minbase bookworm "$root" http://deb.debian.org/debian
# The archive's own list of updates, so that the versions of Python's packages fit each other.
cat >"$root/etc/apt/sources.list" <<'LIST'
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
LIST
chroot "$root" apt-get update -q
DEBIAN_FRONTEND=noninteractive chroot "$root" \
    apt-get install -y -q --no-install-recommends python3.11-venv ca-certificates
chroot "$root" apt-get clean
rm -rf "$root"/var/lib/apt/lists/*
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add -q "$container" "$root" /
"${buildah[@]}" commit -q "$container" "$tag"
"${buildah[@]}" rm "$container" >/dev/null
rm -rf "$root"
