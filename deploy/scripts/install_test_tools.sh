#!/usr/bin/env bash
# Installs the Debian packages that tests need and this machine lacks: Prometheus with promtool
# (tests/operators), Chromium with its driver (the console's tests) and nginx (tests/kubernetes; Helm
# comes with requirements/dev.lock). Needs root where one is missing; does nothing where all are there.
set -euo pipefail

declare -A package=(
  [prometheus]=prometheus
  [promtool]=prometheus
  [chromium]=chromium
  [chromedriver]=chromium-driver
  [nginx]=nginx-light
)

# nginx lies where only root looks.
PATH=$PATH:/usr/sbin
missing=()
for tool in "${!package[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package[$tool]}")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
if ((EUID != 0)); then
  echo "install_test_tools.sh: as root, run: apt-get install -y ${missing[*]}" >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
# Debian starts services when it installs them; the tests start their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -q
apt-get install -y -q --no-install-recommends "${missing[@]}"
