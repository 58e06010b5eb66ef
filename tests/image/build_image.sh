#!/usr/bin/env bash
# build_image.sh FOLDER TAG [BUILDAH_ARGUMENT...]: builds the repository's Dockerfile with every RUN
# step executed in a chroot, over a base image of make_base.sh.
#
# Each step is a layer, as in Docker: a second build repeats only what changed. pip inside sees what
# pip on this host sees: its configuration, certificates and local wheels. $CONTEXT is another folder
# with the files of the repository.
set -euo pipefail

folder=$1
tag=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
base=localhost/rbln-base:trixie
mkdir -p "$folder"
"$here/make_base.sh" "$folder" "$base"
mounts=()
user=${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf
# Where pip looks for a site's configuration, beside /etc/pip.conf.
[ ! -e "$user" ] || mounts+=(-v "$user:/etc/xdg/pip/pip.conf:ro")
for path in /etc/pip.conf /etc/ssl/certs /opt/wheels /opt/pypi /opt/pypi-more; do
    [ ! -e "$path" ] || mounts+=(-v "$path:$path:ro")
done
# OCI's own image format has no health check.
exec nice "$here/buildah.sh" "$folder" bud --layers --isolation chroot --format docker \
    "${mounts[@]}" --build-arg "BASE=$base" \
    --build-arg "REVISION=$(git -C "$here" rev-parse HEAD)" \
    --build-arg "CREATED=$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
    --tag "$tag" "$@" "${CONTEXT:-$here/../..}"
