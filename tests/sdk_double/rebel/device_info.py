"""Which NPUs a process sees."""

from __future__ import annotations

import os

from rebel.settings import SETTINGS


def visible_devices() -> list[int]:
    """Numbers of the host's NPUs that this process may open, as its environment names them."""
    present = range(SETTINGS.devices) if SETTINGS.npu else range(0)
    named = os.environ.get("RBLN_DEVICES") or os.environ.get("RBLN_VISIBLE_DEVICES")
    if named is None:
        return list(present)
    return [int(word) for word in named.split(",") if word.strip() and int(word) in present]


def get_npu_name(device_id: int = 0) -> str | None:
    """Name of the NPU with this index among the visible ones; None where there is none."""
    return SETTINGS.npu if device_id < len(visible_devices()) else None


def target_name() -> str | None:
    """The NPU that graphs are compiled for: the one that is there, or the one that is named."""
    forced = os.environ.get("RBLN_FORCE_NPU_NAME") or os.environ.get("RBLN_TARGET_SOC")
    return get_npu_name() or forced
