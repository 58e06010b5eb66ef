#!/usr/bin/env bash
# install_packages.sh PACKAGE...: installs Debian packages into an image without leaving lists or caches.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install --yes -q --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
