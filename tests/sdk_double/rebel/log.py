"""One JSON line for every call of the double, in the file that ``SDK_DOUBLE_LOG`` names."""

from __future__ import annotations

import json
import os
import sys

import torch
from rebel.settings import SETTINGS

_ENVIRONMENT = ("RBLN_", "RCCL_", "LOCAL_RANK", "WORLD_SIZE", "RANK")


def write(call: str, **facts: object) -> None:
    """Append ``{"call": call, "pid": ..., **facts}``; nothing where there is no log."""
    if SETTINGS.log is None:
        return
    line = json.dumps({"call": call, "pid": os.getpid(), **facts}, default=str) + "\n"
    # One write of one line to a file opened for appending: ranks share the file.
    with SETTINGS.log.open("ab", buffering=0) as file:
        file.write(line.encode())


def environment() -> dict[str, str]:
    """The variables of this process that the SDK could read."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)}


def write_environment(when: str) -> None:
    """The rank's environment and threads, when the SDK is imported and when it opens a device."""
    facts = {"variables": environment(), "threads": torch.get_num_threads()}
    write("environment", when=when, program=sys.argv[:1], **facts)
