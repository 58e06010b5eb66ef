"""Threads and memory of one rank of the emulated device, from its settings and its host."""

from __future__ import annotations

import os

from rbln_backend.config import RblnConfig
from rbln_backend.emulator.kernel_set import set_threads
from rbln_backend.emulator.memory import choose_memory
from rbln_backend.errors import ConfigError
from rbln_backend.host.cores import chosen_cores, core_budget
from rbln_backend.reporting.description import RuntimeInfo


def set_up_runtime(config: RblnConfig, local_rank: int, num_ranks: int) -> RuntimeInfo:
    """Take cores, threads and memory for one of the ranks of this host; returns what was taken.

    Call it once the kernels are loaded, before there are threads or tensors of the model. Raises
    ``ConfigError`` for processors that this process may not use or that are fewer than the threads.
    """
    affinity = config.thread_affinity
    if affinity != "none":
        chosen = chosen_cores("thread_affinity", affinity, os.sched_getaffinity(0))
        budget = core_budget(chosen)
        share = budget.share(local_rank, num_ranks)
        if config.num_threads is not None and config.num_threads > len(share):
            raise ConfigError(
                f"num_threads={config.num_threads} exceeds the cores that "
                f"thread_affinity={affinity!r} leaves a rank: {len(share)}"
            )
        os.sched_setaffinity(0, share)
    else:
        budget = core_budget()
        share = budget.share(local_rank, num_ranks)
    threads = config.num_threads or budget.threads(local_rank, num_ranks)
    set_threads(threads)
    memory = choose_memory(
        mapped=config.allocator == "auto", huge_pages=config.huge_pages == "auto"
    )
    return RuntimeInfo(
        threads=threads,
        cores=list(share),
        cpu_quota=budget.quota,
        thread_affinity=affinity,
        allocator=memory.allocator,
        allocator_reason=memory.allocator_reason,
        huge_pages=memory.huge_pages,
        huge_pages_reason=memory.huge_pages_reason,
        huge_page_bytes=None,
    )
