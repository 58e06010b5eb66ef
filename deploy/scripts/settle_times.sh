#!/usr/bin/env bash
# settle_times.sh FOLDER...: gives all files the same time, so that the same files make the same
# layer of an image whenever they are installed.
set -euo pipefail

find "$@" -exec touch --no-dereference --date=@0 {} +
