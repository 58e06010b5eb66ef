"""A worker's part of `/v1/server_info`: device, model, KV cache and store."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from rbln_backend.devices.emulated.kernel_set import KernelSet
from rbln_backend.devices.emulated.memory import huge_page_bytes
from rbln_backend.devices.port import Compiler
from rbln_backend.kv_cache.specs import WindowSpec, layer_specs, window_in
from rbln_backend.kv_transfer.options import transfer_info
from rbln_backend.reports.info import (
    BucketsInfo,
    CacheInfo,
    DescriptionWriter,
    DeviceInfo,
    DraftModelInfo,
    KvGroupInfo,
    KvInfo,
    LimitsInfo,
    LoraInfo,
    RuntimeInfo,
    ServedModelInfo,
)
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.settings import compiled_sizes, configured
from rbln_backend.worker.draft_model import draft_model
from rbln_backend.worker.metrics import PHASE_SECONDS
from rbln_backend.worker.preflight import quantized_summary, weight_bytes

logger = init_logger(__name__)


_PHASES = ("init", "load", "compile", "warmup")


class SelfDescription(DescriptionWriter):
    """One rank's description, written section by section during the start-up."""

    def __init__(
        self, run_dir: Path | None, rank: int, config: VllmConfig, board: MetricsBoard
    ) -> None:
        super().__init__(run_dir, rank)
        self._config, self._board = config, board
        self._runtime: RuntimeInfo | None = None

    def started(self) -> None:
        """Tell what is known before anything is done."""
        scheduler = self._config.scheduler_config
        self.write("settings", configured(self._config).to_dict())
        self._write_model(weight_bytes=None, quantized_layers=None)
        limits = LimitsInfo(
            max_model_len=self._config.model_config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        self.write("limits", limits)
        self.write_buckets(None)

    def has_device(self, compiler: Compiler) -> None:
        npu = compiler.fingerprint().get("npu")
        self.write("device", DeviceInfo(name=compiler.name, npu=None if npu is None else str(npu)))

    def has_kernels(self, compiler: Compiler, kernels: KernelSet, runtime: RuntimeInfo) -> None:
        self._runtime = runtime
        info = DeviceInfo(
            name=compiler.name,
            kernels=kernels.name,
            isa=kernels.isa,
            library=None if kernels.library is None else str(kernels.library),
            reason=kernels.reason,
        )
        self.write("device", info)
        self.write("runtime", runtime)

    def has_model(self, model: nn.Module) -> None:
        """Describe the loaded model, and the draft model that is a part of it."""
        self._write_model(
            weight_bytes=weight_bytes(model), quantized_layers=quantized_summary(model)
        )
        heads, speculation = draft_model(model), self._config.speculative_config
        if heads is not None and speculation is not None:
            info = DraftModelInfo(
                name=speculation.draft_model_config.model,
                method=str(speculation.method),
                drafts=speculation.num_speculative_tokens,
                weight_bytes=weight_bytes(heads),
            )
            self.write("draft_model", info)
            logger.info(
                "Draft model: %s (%s), %d drafts a step", info.name, info.method, info.drafts
            )
        self._write_phases()

    def has_adapters(self, num_bytes: int) -> None:
        lora = self._config.lora_config
        assert lora is not None
        info = LoraInfo(max_loras=lora.max_loras, max_lora_rank=lora.max_lora_rank, bytes=num_bytes)
        self.write("lora", info)

    def write_buckets(self, usage_file: Path | None) -> None:
        sizes, file = compiled_sizes(self._config), None if usage_file is None else str(usage_file)
        decode, prefill = list(sizes.decode or ()), list(sizes.chunks)
        self.write("buckets", BucketsInfo(decode=decode, prefill=prefill, usage_file=file))

    def has_kv_caches(self, kv_cache_config: KVCacheConfig) -> None:
        groups = []
        for group in kv_cache_config.kv_cache_groups:
            specs = layer_specs(group.kv_cache_spec, group.layer_names)
            spec = next(iter(specs.values()))
            window = spec if isinstance(spec, WindowSpec) else None
            groups.append(
                KvGroupInfo(
                    kind="paged" if window_in(spec) is None else "window",
                    layers=len(specs),
                    block_size=spec.block_size if window is None else window.window,
                    blocks=(window.own_blocks if window else 0) or kv_cache_config.num_blocks,
                    dtype=str(spec.dtype).removeprefix("torch."),
                    log_pages=window.log_pages if window else 0,
                    log_page_tokens=window.page_tokens if window else 0,
                )
            )
        num_bytes = int(self._board.value("rbln_device_memory_bytes", kind="kv"))
        self.write("kv", KvInfo(bytes=num_bytes, groups=groups))
        transfer = self._config.kv_transfer_config
        if transfer is not None:
            self.write("kv_transfer", transfer_info(transfer))

    def is_ready(self) -> None:
        """Describe graphs, store, phases and memory after the warm-up; nothing is written later."""
        rbln, board = configured(self._config), self._board
        hits, misses, corrupt = (
            int(board.value("rbln_compile_cache_requests_total", result=result))
            for result in ("hit", "miss", "corrupt")
        )
        cache = CacheInfo(
            root=str(Path(rbln.cache_root) / "rbln" / "graphs"),
            enabled=not rbln.disable_compile_cache,
            read_only=rbln.cache_read_only,
            max_bytes=rbln.cache_max_bytes,
            hits=hits,
            misses=misses,
            corrupt=corrupt,
            entries=int(board.value("rbln_compile_cache_entries")),
            bytes=int(board.value("rbln_compile_cache_size_bytes")),
        )
        self.write("cache", cache)
        self._write_phases()
        if self._runtime is not None:
            runtime = dataclasses.replace(self._runtime, huge_page_bytes=huge_page_bytes())
            self.write("runtime", runtime)

    def _write_model(self, **loaded: Any) -> None:
        """Write the served model; what is ``loaded`` is None before."""
        model = self._config.model_config
        info = ServedModelInfo(
            name=model.model,
            architecture=model.architecture,
            runner=model.runner_type,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=model.quantization,
            **loaded,
        )
        self.write("model", info)

    def _write_phases(self) -> None:
        seconds = {phase: self._board.value(PHASE_SECONDS, phase=phase) for phase in _PHASES}
        self.write("phases", {phase: round(s, 3) for phase, s in seconds.items() if s})
