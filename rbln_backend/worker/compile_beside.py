"""The process that compiles for an NPU beside the engine that has it.

``python -m rbln_backend.worker.compile_beside FOLDER`` reads the `CompileJob` of ``FOLDER``, fills
the store and exits. Progress goes to files of the same folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rbln_backend.vllm_compat.surface import settled
from rbln_backend.worker.buckets.compile_job import CompileJob
from rbln_backend.worker.check.precompile import compile_model

NOT_STORED = 3
"""Exit code: some graph is not in the store."""

_WORKER = "rbln_backend.worker.compile_worker.CompileBesideWorker"
_PR_SET_PDEATHSIG = 1
_NICENESS = 19


def run(job: CompileJob, folder: Path) -> Sequence[str]:
    """Compile into the store, with progress to ``folder``; return what is not stored."""
    config: Any = job.config
    own = settled(config)
    # As a start with these sizes has them, wherever vLLM settles the configuration again.
    rbln = own.rbln.model_copy(
        update={
            "run_dir": str(folder),
            "record_usage": False,
            "decode_batch_bucket_strategy": "manual",
            "decode_batch_bucket_manual_buckets": tuple(job.sizes.decode or ()),
            "prefill_chunk_buckets": tuple(job.sizes.chunks),
        }
    )
    config.additional_config = replace(own, rbln=rbln, buckets=job.sizes)
    # Binaries depend on the number of blocks, which must not be derived again.
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks
    config.model_config.original_max_model_len = config.model_config.max_model_len
    return compile_model(config, (), worker=_WORKER, known=job.known).missing


def main(folder: Path) -> int:
    """Return the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    missing = run(CompileJob.read(folder), folder)
    if missing:
        sys.stderr.write(f"not stored: {', '.join(missing)}\n")
        return NOT_STORED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
