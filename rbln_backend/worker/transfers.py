"""The hooks of a KV connector around the steps of a rank, and blocks that others read."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
)

from rbln_backend.worker.runner import RblnModelRunner

if TYPE_CHECKING:
    from rbln_backend.devices.port import KvMemory


class TransferRunner:
    """A runner whose steps also read blocks from other servers, and keep blocks for them.

    A graph is a whole model, so nothing happens between two layers: reads begin before the graph
    and go on beside it, and what has ended is reported with the result of the step.
    """

    def __init__(
        self,
        runner: RblnModelRunner,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        blocks: SharedBlocks,
    ) -> None:
        """``blocks``: what other servers can read."""
        connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        assert isinstance(connector, KVConnectorBase_V1)
        connector.register_kv_caches(dict(blocks.tensors))
        if blocks.are_copies:
            connector.set_host_xfer_buffer_ops(blocks.copy)
        self._runner = runner
        self.connector = connector
        self._ended: KVConnectorOutput | None = None

    def run_idle(self) -> None:
        self._runner.run_idle()

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """As ``RblnModelRunner.execute_model``; a step without tokens reports what has ended."""
        metadata = scheduled.kv_connector_metadata
        assert metadata is not None
        connector = self.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        # Upstream's connector does not read the context of a forward pass.
        connector.start_load_kv(None)  # type: ignore[arg-type]
        result = self._runner.execute_model(scheduled)
        connector.wait_for_save()
        results = connector.get_transfer_results(scheduled.finished_req_ids)
        self._ended = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
        )
        connector.clear_connector_metadata()
        return None if result is None else self._with_ended(result)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | None:
        result = self._runner.sample_tokens(grammar)
        assert not isinstance(result, AsyncModelRunnerOutput), (
            "refused with asynchronous scheduling"
        )
        return None if result is None else self._with_ended(result)

    def close(self) -> None:
        self.connector.shutdown()

    def _with_ended(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return ``result`` with the transfers that have ended, which are reported once."""
        ended, self._ended = self._ended, None
        if ended is None or ended.is_empty():
            return result
        if result is EMPTY_MODEL_RUNNER_OUTPUT:
            result = copy.copy(result)
        result.kv_connector_output = ended
        return result


class SharedBlocks:
    """The caches themselves, or, for caches in an NPU's memory, buffers of their size.

    Blocks are copied to the buffers when a prompt is computed, and out of them when another
    server's have arrived. vLLM calls ``copy`` for both.
    """

    def __init__(self, memory: KvMemory, caches: Mapping[str, Tensor]) -> None:
        """``caches``: [num_blocks, 2, Hkv, 1, block_size, D] by layer name."""
        self._memory, self._caches = memory, caches
        self.tensors: Mapping[str, Tensor] = {
            name: memory.shared_blocks(cache) for name, cache in caches.items()
        }
        self.are_copies = any(self.tensors[name] is not cache for name, cache in caches.items())

    def copy(
        self,
        sources: Mapping[str, Tensor],  # noqa: ARG002 - vLLM's keys and values, here one block
        targets: Mapping[str, Tensor],  # noqa: ARG002
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        direction: str,
    ) -> None:
        """Copy blocks of every layer, "d2h" or "h2d": vLLM's ``CopyBlocksOp``.

        A block has one number on both sides; ``sources`` and ``targets`` [...] are not read.
        """
        assert source_ids == target_ids
        move = self._memory.read_tokens if direction == "d2h" else self._memory.write_tokens
        for name, cache in self._caches.items():
            for block in source_ids:
                move(cache, block, 0, self.tensors[name][block])
