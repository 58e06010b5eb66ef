"""The kernel's permission to use AMX, which a process requests before its first tile.

vLLM's CPU attention selects AMX by processor features and relies on oneDNN to request the
permission. If the first prompt has one token, oneDNN multiplies nothing with tiles and requests
nothing, and the process dies of SIGILL.
"""

from __future__ import annotations

import ctypes
import platform

# Linux' numbers for x86-64: asm/unistd_64.h, asm/prctl.h, and the state component of tile data.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18


def request_tiles() -> bool:
    """Request tiles for this process and its children; return False without AMX.

    Call it before threads start: the kernel refuses if a thread's signal stack is too small.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)
