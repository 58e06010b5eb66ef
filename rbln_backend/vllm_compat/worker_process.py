"""Process of a rank that vLLM's multiprocessing executor starts."""

from __future__ import annotations

import ctypes
import os
import signal

from vllm import envs

_PR_SET_PDEATHSIG = 1


def end_with_engine() -> None:
    """Make the kernel kill this process when the engine process ends, for any reason.

    vLLM's own watch lets a rank finish its current call, which may be a compile of minutes. The
    signal is sent at the end of the thread that started this process, the main thread of an engine
    process. A user's program may create an engine in any thread; only vLLM's watch is used there.
    """
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        # The engine process has ended already.
        os._exit(1)
