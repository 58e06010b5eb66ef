"""The process that tries grammars: it may hang, crash or be killed without harm to anyone."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from rbln_backend import api
from server.host.job_pool import limit_growth
from server.structured_outputs.trial_job import do_job

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NICENESS = 5


def serve_trials(pipe: Connection, vllm_config: VllmConfig) -> None:
    """Answer jobs until the pipe ends; the first message says that the process is ready."""
    import setproctitle

    setproctitle.setproctitle("rbln-serve: grammar trials")
    os.nice(_NICENESS)
    trial = api.grammar_trial(vllm_config)
    limit_growth()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            pipe.send_bytes(do_job(pipe.recv_bytes(), trial).to_bytes())
