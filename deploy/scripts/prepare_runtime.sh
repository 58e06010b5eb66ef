#!/usr/bin/env bash
# prepare_runtime.sh [ROOT]: the user of the image and the folders that a container may write to,
# below ROOT (default: this system).
#
# All of it belongs to group 0 and the group may do what the owner may, so that a container also
# runs under a user id that nobody has heard of, as long as its group is 0.
set -euo pipefail

root=${1:-}
user=10001
if ! grep -q '^rbln:' "$root/etc/passwd"; then
    echo "rbln:x:$user:0:rbln-serve:/home/rbln:/usr/sbin/nologin" >>"$root/etc/passwd"
fi
for folder in home/rbln cache models adapters data; do
    mkdir -p "$root/$folder"
    chown "$user:0" "$root/$folder"
    # Files made below belong to group 0 too, whatever the first group of their maker is.
    chmod 2775 "$root/$folder"
done
