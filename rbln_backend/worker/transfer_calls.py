"""Worker methods of engines whose KV other servers read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rbln_backend.vllm_compat.surface import VllmConfig, get_pp_group, get_tp_group
from rbln_backend.worker.adapter_calls import AdapterCalls
from rbln_backend.worker.engine_build import EngineBuild, Runner
from rbln_backend.worker.model_runner import RblnModelRunner

if TYPE_CHECKING:
    from rbln_backend.worker.transfer_runner import TransferRunner


class TransferCalls(AdapterCalls):
    """Makes the connector of a worker, and what vLLM calls of it."""

    vllm_config: VllmConfig
    _transfer: TransferRunner | None = None

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        """Return what other servers need to read blocks here, by pipeline and tensor rank."""
        if self._transfer is None:
            return None
        metadata = self._transfer.connector.get_handshake_metadata()
        ranks = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        return None if metadata is None else {ranks: metadata}

    def _with_transfer(self, runner: Runner, build: EngineBuild) -> Runner | TransferRunner:
        """Return ``runner``, with the hooks of a KV connector if there is one."""
        if self.vllm_config.kv_transfer_config is None:
            return runner
        from rbln_backend.kv_transfer.shared_blocks import SharedBlocks
        from rbln_backend.worker.transfer_runner import TransferRunner

        assert isinstance(runner, RblnModelRunner), "checked by check_nixl"
        caches = build.kv_caches
        blocks = SharedBlocks(caches.memory, caches.tensors)
        self._transfer = TransferRunner.of(runner, self.vllm_config, build.kv_cache_config, blocks)
        return self._transfer

    def _end_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
