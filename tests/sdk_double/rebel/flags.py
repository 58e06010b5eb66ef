"""Switches of the SDK that callers read."""

from __future__ import annotations

import os

RBLN_PROFILER = os.environ.get("RBLN_PROFILER", "0").lower() in ("1", "true")
