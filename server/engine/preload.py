"""Preloads the engine's modules in the fork server, from which engine processes are forked.

The fork server starts together with the HTTP process and imports on another core. No import here
may start a thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

from rbln_backend import api
from rbln_backend.host.processes import outlive_readers
from server.host.tasks import without_garbage_collection

_PR_SET_PDEATHSIG = 1
_FORK_SERVER = os.getpid()


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _in_child() -> None:
    # Only engine processes: the signal comes when the forking thread ends, and they may fork
    # children from short-lived threads.
    if os.getppid() == _FORK_SERVER:
        _die_with_parent()


# Before imports that store the standard streams, as logging does.
outlive_readers()

# The engine must not outlive a killed server and hold the device.
_die_with_parent()
os.register_at_fork(after_in_child=_in_child)

# Ctrl-C reaches every process of the terminal's foreground group. The engine leaves that group,
# because it must finish in-flight requests.
os.setpgid(0, 0)

with without_garbage_collection():
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.llama  # its layers are used by most models
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor  # noqa: F401

    if api.is_active():
        api.load_worker()
