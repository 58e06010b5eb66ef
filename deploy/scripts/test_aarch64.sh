#!/usr/bin/env bash
# test_aarch64.sh FOLDER VENV [PYTEST ARGUMENTS]: runs the kernels' tests as aarch64 programs under qemu-user.
# Debian 12, as root, x86-64: it installs the packages qemu-user and g++-aarch64-linux-gnu, makes a link to the
# arm64 loader in /lib, and puts Python 3.11 for arm64, the locked wheels and torch (2 to 6 GB) into FOLDER.
# VENV lends its pip.
# The first run takes about 20 minutes, later ones 10. Speed under emulation says nothing.
set -euo pipefail

folder=$(realpath -m "$1")
pip=("$(realpath -s "$2")/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps)
shift 2
here=$(realpath "$(dirname "$0")/../..")
root=$folder/root site=$folder/site cuda=$folder/cuda bin=$folder/bin
# Without SVE, as most aarch64 servers of 2019 to 2022; torch's libraries do not start on qemu's "max".
cpu=neoverse-n1
features='fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp'
packages=(python3.11 python3.11-minimal libpython3.11-stdlib libpython3.11-minimal libc6 libgcc-s1 libstdc++6
  zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libgomp1)
# PyPI's torch for aarch64 is built for CUDA and does not load without these, of any release.
libraries=(nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft
  nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13
  nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx)
wheels=(--only-binary :all: --python-version 3.11 --platform manylinux2014_aarch64)
for minor in {17..36}; do wheels+=(--platform "manylinux_2_${minor}_aarch64"); done

install_programs() {
  # Each by itself: `command -v` of two succeeds if it finds one.
  { command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++; } >/dev/null ||
    { apt-get update -q && apt-get install -y -q --no-install-recommends qemu-user g++-aarch64-linux-gnu; }
  # It is written last.
  [[ -e $root/cpuinfo ]] && return
  # Lists of their own, so that the host does not get another architecture.
  local apt=(apt-get -q -o "APT::Architectures::=$(dpkg --print-architecture)" -o APT::Architectures::=arm64
    -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache")
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/packages"
  "${apt[@]}" update
  (cd "$folder/packages" && "${apt[@]}" download "${packages[@]/%/:arm64}")
  for package in "$folder/packages"/*.deb; do dpkg -x "$package" "$root"; done
  # All that PyTorch reads: with an incomplete list, its first operator ends by a segmentation fault.
  local number
  for number in 0 1; do
    printf '%s\t: %s\n' processor "$number" BogoMIPS 50.00 Features "$features" 'CPU implementer' 0x41 \
      'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c 'CPU revision' 1
    echo
  done >"$root/cpuinfo"
}

install_wheels() {
  [[ -e $folder/installed ]] && return
  "${pip[@]}" --target "$site" "${wheels[@]}" --require-hashes -r "$here/requirements/cpu.lock"
  # Without the hashes, which dev.lock has for x86-64 alone.
  mapfile -t tools < <(grep -oE '^(pytest|pytest-.*|execnet|hypothesis|iniconfig|pluggy|sortedcontainers)==[^ ]+' \
    "$here/requirements/dev.lock")
  "${pip[@]}" --target "$site" "${wheels[@]}" "${tools[@]}"
  "${pip[@]}" --target "$site" "${wheels[@]}" --require-hashes -r "$here/requirements/torch.txt" ||
    install_torch_for_cuda
  touch "$folder/installed"
}

install_torch_for_cuda() {
  "${pip[@]}" --target "$site" "${wheels[@]}" torch==2.13.0
  mkdir -p "$cuda"
  for library in "${libraries[@]}"; do
    # Of some, 0.0.1 is a file without content.
    "${pip[@]}" --target "$folder/$library" "${wheels[@]}" "$library>0.1"
    find "$folder/$library" -name '*.so*' -exec ln -sf {} "$cuda" \;
  done
}

write_compiler() {
  mkdir -p "$bin"
  # A cross compiler knows no "native".
  # shellcheck disable=SC2016
  printf '#!/bin/bash\nexec aarch64-linux-gnu-g++ "${@/-march=native/-march=armv8.2-a+dotprod}"\n' >"$bin/g++"
  chmod +x "$bin/g++"
}

install_programs
install_wheels
write_compiler
# Not qemu's -L in place of the link: a program that opens / would see the prefix.
ln -sfn "$root/lib/ld-linux-aarch64.so.1" /lib/ld-linux-aarch64.so.1
cd "$here"
# The features that levels are chosen by are read from /proc/cpuinfo. What builds the levels of x86-64 is left
# out, and what needs memory calls that qemu-user does not emulate (the marker in pyproject.toml). vLLM's
# reference for log-probabilities goes through torch.compile, which does not work here: its compiler has no headers of Python.
# PyTorch's own product of bfloat16 warns once that this CPU has no instructions for it.
# shellcheck disable=SC2016
exec unshare --mount bash -c 'mount --bind "$0/cpuinfo" /proc/cpuinfo; exec "$@"' "$root" \
  qemu-aarch64 -cpu "$cpu" -E PATH="$bin:/usr/bin:/bin" -E HOME="$folder/home" -E OMP_NUM_THREADS=1 \
  -E TORCHDYNAMO_DISABLE=1 \
  -E VLLM_NO_USAGE_STATS=1 -E HF_HUB_OFFLINE=1 -E PYTHONPATH="$site:$here" \
  -E LD_LIBRARY_PATH="$root/lib/aarch64-linux-gnu:$root/usr/lib/aarch64-linux-gnu:$cuda" \
  "$root/usr/bin/python3.11" -m pytest tests/unit/emulator \
  -p no:cacheprovider -p no:xdist -o timeout=0 -m 'not host_memory' -W 'ignore:mkldnn_matmul failed:UserWarning' \
  --ignore-glob '*/test_build*.py' --ignore-glob '*/test_variants.py' --ignore-glob '*/test_tiles.py' "$@"
