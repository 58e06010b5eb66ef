"""Start of the emulated device on one rank: kernels, then cores, threads and memory."""

from __future__ import annotations

from functools import partial

from rbln_backend.compiler.compilers import builds_kernels, make_emulated_compiler
from rbln_backend.compiler.port import Compiler
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.kernel_set import KernelSet, set_threads
from rbln_backend.emulator.memory import choose_memory
from rbln_backend.host.cores import core_budget
from rbln_backend.reporting.description import RuntimeInfo
from rbln_backend.reporting.progress import ProgressWriter


def start_kernels(rbln: RblnConfig, progress: ProgressWriter) -> tuple[Compiler, KernelSet]:
    """Return the emulated compiler and its kernels; report a build."""
    if not builds_kernels(rbln):
        return make_emulated_compiler(rbln)
    progress.phase("init", "building the kernels for this CPU, once")
    return make_emulated_compiler(rbln, partial(progress.step, "building the kernels: files"))


def set_up_runtime(config: RblnConfig, local_rank: int, num_ranks: int) -> RuntimeInfo:
    """Set cores, threads and memory of one of the ranks of this host, and return them.

    Call it after the kernels are loaded, before there are threads or tensors of the model.
    """
    budget = core_budget()
    share = budget.share(local_rank, num_ranks)
    threads = config.num_threads or budget.threads(local_rank, num_ranks)
    set_threads(threads)
    memory = choose_memory(
        mapped=True,
        huge_pages=True,
    )
    return RuntimeInfo(
        threads=threads,
        cores=list(share),
        cpu_quota=budget.quota,
        allocator=memory.allocator,
        allocator_reason=memory.allocator_reason,
        huge_pages=memory.huge_pages,
        huge_pages_reason=memory.huge_pages_reason,
        huge_page_bytes=None,
    )
