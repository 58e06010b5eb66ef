"""The process that tries grammars: it may hang, crash or be killed without harm to anyone."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from server.structured_outputs.trial_job import do_job

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NICENESS = 5
_MEMORY_BYTES = 2 << 30


def serve_trials(pipe: Connection, vllm_config: VllmConfig) -> None:
    """Answer jobs until the pipe ends; the first message says that the process is ready."""
    import setproctitle
    from vllm.platforms import current_platform

    setproctitle.setproctitle("rbln-serve: grammar trials")
    os.nice(_NICENESS)
    trial = current_platform.grammar_trial(vllm_config)
    _limit_memory()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            pipe.send_bytes(do_job(pipe.recv_bytes(), trial).to_bytes())


def _limit_memory() -> None:
    """Let the process grow by 2 GiB; a grammar that needs more fails here, not in the engine."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    size = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_BYTES,) * 2)
