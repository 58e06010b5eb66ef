#!/usr/bin/env bash
# make test-tools: installs the Debian packages that tests use and this machine lacks: Prometheus with
# promtool (tests/operators), Chromium with its driver and curl (the console's tests) and nginx
# (tests/kubernetes). A user other than root, or a machine without apt-get, gets a warning; pytest then
# skips and counts these tests (tests/debian_tools.py).
set -euo pipefail

declare -A package=(
  [prometheus]=prometheus
  [promtool]=prometheus
  [chromium]=chromium
  [chromedriver]=chromium-driver
  [nginx]=nginx-light
  [curl]=curl
)

# chromedriver is reached as localhost, which a fresh chroot does not resolve.
if ((EUID == 0)) && ! getent hosts localhost >/dev/null; then
  echo "127.0.0.1 localhost" >>/etc/hosts
fi
# Debian's nginx is only on root's PATH.
PATH=$PATH:/usr/sbin
missing=()
for tool in "${!package[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package[$tool]}")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
  echo "Not installed, so the tests that need them are skipped: ${missing[*]}." >&2
  echo "To run them: as root, apt-get install -y ${missing[*]}" >&2
  exit 0
fi

export DEBIAN_FRONTEND=noninteractive
# Debian starts services at installation; tests start their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -q
apt-get install -y -q --no-install-recommends "${missing[@]}"
