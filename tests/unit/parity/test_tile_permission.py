"""AMX's permission, requested from the real kernel in a separate process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# 0x1021 and 0x1022 give the state components that the machine has and that this process may use.
_ASK = """
import ctypes
from rbln_backend.parity.runners.tile_permission import request_tiles

def components(operation):
    mask = ctypes.c_uint64()
    ctypes.CDLL(None).syscall(158, operation, ctypes.byref(mask))
    return mask.value

print(request_tiles(), bool(components(0x1021) >> 18 & 1), bool(components(0x1022) >> 18 & 1))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_tiles_are_permitted_where_there_are_any() -> None:
    """Elsewhere the answer is no, and nothing else happens."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    printed, has_tiles, permitted = done.stdout.split()
    assert printed == has_tiles == permitted
