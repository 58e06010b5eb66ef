#!/usr/bin/env bash
# prepare_runtime.sh [ROOT]: creates the image's user and the folders that a container may write to,
# below ROOT (default: this system).
#
# All of them belong to group 0 with the owner's permissions, so a container runs under any user id
# whose group is 0.
set -euo pipefail

root=${1:-}
user=10001
if ! grep -q '^rbln:' "$root/etc/passwd"; then
    echo "rbln:x:$user:0:rbln-serve:/home/rbln:/usr/sbin/nologin" >>"$root/etc/passwd"
fi
for folder in home/rbln cache models adapters data; do
    mkdir -p "$root/$folder"
    chown "$user:0" "$root/$folder"
    # Files created below belong to group 0, too.
    chmod 2775 "$root/$folder"
done
