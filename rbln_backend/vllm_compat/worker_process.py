"""The process of a rank that vLLM's multiprocessing executor starts."""

from __future__ import annotations

import ctypes
import os
import signal

from vllm import envs

_PR_SET_PDEATHSIG = 1


def end_with_engine() -> None:
    """Have the kernel end this process when the engine's ends, however that happens.

    vLLM's own watch lets a rank go on until its present call is done, which may be a compile of
    minutes. The signal comes with the end of the thread that started this process; the main thread
    of an engine process does. An engine inside a program of the user's may be made by any thread:
    there, vLLM's watch is all there is.
    """
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        # It has ended already.
        os._exit(1)
