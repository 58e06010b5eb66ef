"""The emulated device of a rank that starts: its kernels, built where they are missing."""

from __future__ import annotations

import time
from functools import partial

from rbln_backend.compiler.device import builds_kernels, make_emulated_compiler
from rbln_backend.compiler.port import Compiler
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.kernel_set import KernelSet
from rbln_backend.reporting.progress import ProgressWriter
from rbln_backend.worker.startup.estimate import StartEstimate


def start_kernels(
    rbln: RblnConfig, progress: ProgressWriter, estimate: StartEstimate
) -> tuple[Compiler, KernelSet]:
    """The emulated compiler; ``progress`` hears what the start will take, and of a build."""
    builds = builds_kernels(rbln)
    expected = estimate.phases_s(builds_kernels=builds)
    progress.expect(expected)
    if not builds:
        return make_emulated_compiler(rbln)
    told = f"building the kernels for this CPU, about {expected['init']:.0f} s, once"
    progress.phase("init", told)
    started = time.perf_counter()
    made = make_emulated_compiler(rbln, partial(progress.step, "building the kernels: files"))
    estimate.costs.keep_kernels(time.perf_counter() - started)
    return made
