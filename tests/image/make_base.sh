#!/usr/bin/env bash
# make_base.sh FOLDER TAG: a base image for the Dockerfile where no registry can be reached: Debian
# trixie from Debian's own archive, with this host's Python 3.11 below /usr/local, where the official
# image has its own. Needs root, debootstrap and buildah; does nothing if the image is there.
set -euo pipefail

folder=$1
tag=$2
here=$(cd "$(dirname "$0")" && pwd)
buildah=("$here/buildah.sh" "$folder")
if "${buildah[@]}" inspect --type image "$tag" >/dev/null 2>&1; then
    exit 0
fi
root=$folder/base
rm -rf "$root"
nice debootstrap --variant=minbase trixie "$root" http://deb.debian.org/debian
# The archive's own list of updates.
cat >"$root/etc/apt/sources.list" <<'LIST'
deb http://deb.debian.org/debian trixie main
deb http://deb.debian.org/debian trixie-updates main
deb http://deb.debian.org/debian-security trixie-security main
LIST
chroot "$root" apt-get update -q
# What the modules of Python's library are linked with.
DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y -q --no-install-recommends \
    ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libreadline8t64 libsqlite3-0 libssl3t64 \
    libuuid1 zlib1g
chroot "$root" apt-get clean
rm -rf "$root"/var/lib/apt/lists/*
prefix=$(python3.11 -c 'import sys; print(sys.base_prefix)')
mkdir -p "$root/usr/local/bin" "$root/usr/local/lib/python3.11"
cp -a "$prefix/bin/python3.11" "$root/usr/local/bin/"
ln -s python3.11 "$root/usr/local/bin/python3"
cp -a "$prefix"/lib/libpython3.11.so* "$root/usr/local/lib/" 2>/dev/null || true # if it is shared
tar -C "$prefix/lib/python3.11" --exclude=./test --exclude=./site-packages --exclude='./config-*' \
    --exclude=./idlelib --exclude=./tkinter --exclude=__pycache__ -c . |
    tar -C "$root/usr/local/lib/python3.11" -x
chroot "$root" ldconfig
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add -q "$container" "$root" /
"${buildah[@]}" commit -q "$container" "$tag"
"${buildah[@]}" rm "$container" >/dev/null
rm -rf "$root"
