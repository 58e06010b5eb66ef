"""The process that tries grammars; the server goes on if it hangs, crashes or is killed."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

# Takes 0.1 s, so the modules that use it import it in functions: the HTTP process must listen
# first. This module is imported while the engine loads, and before the first trial.
import jsonschema  # noqa: F401

from rbln_backend import api
from server.host.job_pool import (
    limit_growth,
    limit_processor_time,
    uncounted_processor_time,
)
from server.structured_outputs.grammars import SchemaRules
from server.structured_outputs.trial_job import do_job

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NICENESS = 5


def serve_trials(
    pipe: Connection, vllm_config: VllmConfig, cpu_s: float, rules: SchemaRules
) -> None:
    """Answer jobs until the pipe closes; the first message is `ready`.

    The process ends at a job that takes more than `cpu_s` of processor time per share.
    """
    import setproctitle

    setproctitle.setproctitle("rbln-serve: grammar trials")
    os.nice(_NICENESS)
    trial = api.grammar_trial(vllm_config, uncounted_processor_time)
    limit_growth()
    specials = trial.special_tokens()
    # Collections of cycles, which take a tenth of a job, wait until its answer is sent.
    gc.freeze()
    gc.disable()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            job = pipe.recv_bytes()
            limit_processor_time(cpu_s)
            verdict = do_job(
                job,
                trial,
                rules,
                specials=specials,
                on_shares=lambda shares: limit_processor_time(cpu_s * shares),
            )
            limit_processor_time(0)
            verdict = replace(verdict, memory_bytes=trial.take_bytes())
            pipe.send_bytes(verdict.to_bytes())
            gc.collect()
