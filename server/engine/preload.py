"""Imported once by the fork server, so that an engine process starts with its modules loaded.

The fork server starts together with the HTTP process and imports on another core while that
one listens. Nothing here may start a thread: engine processes are forked from this state.
"""

from __future__ import annotations

import ctypes
import os
import signal

from rbln_backend import api
from rbln_backend.host.process_life import outlive_readers
from server.host.importing import uncollected
from server.vllm.importing import import_vllm

_PR_SET_PDEATHSIG = 1
_FORK_SERVER = os.getpid()


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _in_child() -> None:
    # Only engine processes: their own children may be forked by threads that end, and the
    # signal comes when the forking thread does.
    if os.getppid() == _FORK_SERVER:
        _die_with_parent()


# Before anything is imported that keeps the streams, as logging does.
outlive_readers()

# A server that was killed must not leave an engine behind that holds the device.
_die_with_parent()
os.register_at_fork(after_in_child=_in_child)

# Ctrl-C reaches every process of the terminal's foreground group. The engine must outlive it
# until in-flight requests are done, so it does not belong to that group.
os.setpgid(0, 0)

with uncollected():
    import_vllm()
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.llama  # its layers are everybody's
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor  # noqa: F401

    if api.is_active():
        api.load_worker()
