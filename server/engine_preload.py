"""Imported once by the fork server, so that an engine process starts with its modules loaded.

The fork server starts together with the HTTP process and imports on another core while that
one listens. Nothing here may start a thread: engine processes are forked from this state.
"""

from __future__ import annotations

import gc
import os

# Ctrl-C reaches every process of the terminal's foreground group. The engine must outlive it
# until in-flight requests are done, so it does not belong to that group.
os.setpgid(0, 0)

# Nothing that is imported here ever becomes garbage; looking for some costs a fifth.
gc.disable()
import vllm.v1.engine.core  # noqa: E402, F401
import vllm.v1.executor.uniproc_executor  # noqa: E402, F401
from vllm.platforms import current_platform  # noqa: E402

if current_platform.device_name:
    # Resolving the platform imports it: the engine would do so as its first act.
    gc.freeze()
gc.enable()
