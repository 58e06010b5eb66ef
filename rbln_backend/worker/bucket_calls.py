"""Worker methods that the server calls by name to change the compiled sizes while it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rbln_backend.bucketing.engine_buckets import EngineBuckets
from rbln_backend.bucketing.usage import PHASES
from rbln_backend.parallel.rules import RANKS_EXECUTOR
from rbln_backend.vllm_compat.surface import VllmConfig, compiled_sizes, configured, settled
from rbln_backend.worker.adapter_calls import AdapterCalls
from rbln_backend.worker.buckets.bucket_change import BucketChange
from rbln_backend.worker.model_runner import RblnModelRunner

if TYPE_CHECKING:
    from rbln_backend.worker.engine_build import EngineBuild, Runner
    from rbln_backend.worker.startup.self_description import SelfDescription
    from rbln_backend.worker.transfer_runner import TransferRunner

_STOPPED = "the engine shuts down"


class BucketCalls(AdapterCalls):
    """Methods of a worker, called between two steps. No call waits for a compiler."""

    opens_device = True
    """False in a process that compiles for a change beside the one that has the NPU."""
    vllm_config: VllmConfig
    _description: SelfDescription
    _build: EngineBuild | None = None
    _runner: Runner | TransferRunner | None = None
    _change: BucketChange | None = None
    _sizes: EngineBuckets | None = None
    """The sizes since the latest change; None before the first."""

    def synchronize_device(self) -> None:
        if isinstance(self._runner, RblnModelRunner):
            self._runner.synchronize()

    def bucket_state(self) -> dict[str, Any]:
        """Return the present sizes, the latest change, and why none is possible, if so."""
        sizes = self._present_sizes()
        return {
            "decode": list(sizes.decode or ()),
            "prefill": list(sizes.chunks),
            "largest": {
                "decode": sizes.decode.largest if sizes.decode is not None else 0,
                "prefill": sizes.chunks.largest,
            },
            "refusal": self._refusal(),
            "change": None if self._change is None else self._change.report(),
            "verify": len(list(sizes.verify)),
            "graphs": 0 if self._build is None else len(self._build.served.graphs.inputs),
        }

    def start_bucket_change(self, decode: Sequence[int], prefill: Sequence[int]) -> dict[str, Any]:
        """Begin to replace the sizes by `decode` and `prefill`, in place of a running change.

        Raises `BucketError` for sizes that are not ascending or have other largest ones, and
        where `bucket_state` has a refusal.
        """
        assert self._build is not None
        assert self._runner is not None
        self.stop_bucket_change("replaced by another change")
        sizes = self._present_sizes().resized(decode, prefill)
        served, charge = self._build.served, self._runner.steps.charge_warm_up
        self._change = BucketChange(served, sizes, self._take_sizes, charge)
        return self._change.report()

    def advance_bucket_change(self, phase: str) -> dict[str, Any]:
        """Do one piece of work of `phase`, at most a graph's run, and return the report.

        `phase` is that of the rank that is behind: the others wait for it.
        """
        assert self._change is not None
        self.synchronize_device()
        self._change.advance(phase)
        return self._change.report()

    def stop_bucket_change(self, reason: str = _STOPPED) -> None:
        """Give up a change that is not done."""
        change = self._change
        if change is not None and not change.is_done and change.error is None:
            change.close(reason)

    def release_graphs(self) -> int:
        """Free the graphs that neither the present sizes nor a change use; return how many."""
        if self._build is None:
            return 0
        self.synchronize_device()
        change = self._change
        is_open = change is not None and not change.is_done and change.error is None
        return self._build.served.graphs.release(change.specs if change and is_open else ())

    def bucket_usage(self) -> dict[str, Any] | None:
        """Return the counts of steps since the engine's start; None where none are recorded."""
        usage = self._build.usage if self._build is not None else None
        if usage is None:
            return None
        total = usage.total
        return {phase: _lists(total.phases[phase]) for phase in PHASES}

    def _present_sizes(self) -> EngineBuckets:
        return self._sizes or compiled_sizes(self.vllm_config)

    def _take_sizes(self, sizes: EngineBuckets) -> None:
        self._sizes = sizes
        settled(self.vllm_config).size_changes.announce(sizes)
        self._description.takes_buckets(sizes)
        assert self._build is not None
        if isinstance(self._runner, RblnModelRunner):
            self._runner.take_verify_sizes(sizes.verify)
        if self._build.usage is not None:
            self._build.usage.take_buckets(list(sizes.decode or ()), list(sizes.chunks))

    def _refusal(self) -> str | None:
        """Return why this engine cannot change its sizes while it serves, or None."""
        config, parallel = self.vllm_config, self.vllm_config.parallel_config
        if self._build is None:
            return "the engine starts"
        factory, rbln = self._build.served.factory, configured(config)
        writes = not (rbln.disable_compile_cache or rbln.cache_read_only)
        changes = settled(config).size_changes
        passes_sizes = (
            parallel.distributed_executor_backend == RANKS_EXECUTOR or changes.reaches_scheduler
        )
        # What the engine has, by the reason why it needs it.
        conditions = {
            "--data-parallel-size: its engines would swap at different steps": (
                parallel.data_parallel_size == 1
            ),
            "the executor of these ranks does not pass sizes to the scheduler "
            "(--distributed-executor-backend)": passes_sizes,
            "several ranks on an NPU: compiling beside their steps was never run": (
                parallel.world_size == 1 or not factory.compiles_when_loading
            ),
            "use_device_tensor: graphs over tensors on the NPU are compiled by the process that "
            "has it, where steps would wait": factory.compiles_without_device,
            "its graphs are compiled by another process, and no compile cache can be written "
            "(VLLM_DISABLE_COMPILE_CACHE, VLLM_RBLN_CACHE_READ_ONLY)": (
                writes or not factory.compiles_when_loading
            ),
        }
        return next((reason for reason, holds in conditions.items() if not holds), None)


def _lists(usage: Any) -> dict[str, list[list[float]]]:
    """Return counts as lists of pairs, because keys of a map arrive as text."""
    names = ("steps_by_size", "steps_by_bucket", "seconds_by_bucket")
    return {name: [[k, v] for k, v in getattr(usage, name).items()] for name in names}
