"""A worker's part of `/v1/server_info`: device, model, KV cache and store."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from rbln_backend.config import RblnConfig
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
    ExpertsInfo,
    KvGroupInfo,
    KvInfo,
    LimitsInfo,
    LoraInfo,
    RuntimeInfo,
    ServedModelInfo,
)
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.settings import compiled_sizes
from rbln_backend.worker.draft_model import draft_model
from rbln_backend.worker.metrics import PHASE_SECONDS
from rbln_backend.worker.preflight import quantized_summary, weight_bytes

logger = init_logger(__name__)


_PHASES = ("init", "load", "compile", "warmup")


class SelfDescription:
    """One rank's description, written section by section during the start-up."""

    def __init__(
        self, writer: DescriptionWriter, config: VllmConfig, rbln: RblnConfig, board: MetricsBoard
    ) -> None:
        self._writer = writer
        self._config = config
        self._rbln = rbln
        self._board = board
        self._runtime: RuntimeInfo | None = None

    def started(self) -> None:
        """Tell what is known before anything is done."""
        self._writer.write("settings", self._rbln.to_dict())
        self._writer.write("model", _model_info(self._config, None, None))
        limits = LimitsInfo(
            max_model_len=self._config.model_config.max_model_len,
            max_num_seqs=self._config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self._config.scheduler_config.max_num_batched_tokens,
        )
        self._writer.write("limits", limits)
        self._writer.write("buckets", _buckets_info(self._config, None))

    def has_device(self, compiler: Compiler) -> None:
        npu = compiler.fingerprint().get("npu")
        info = DeviceInfo(
            name=compiler.name,
            npu=None if npu is None else str(npu),
            kernels=None,
            isa=None,
            library=None,
            reason="",
        )
        self._writer.write("device", info)

    def has_kernels(self, compiler: Compiler, kernels: KernelSet, runtime: RuntimeInfo) -> None:
        self._runtime = runtime
        info = DeviceInfo(
            name=compiler.name,
            npu=None,
            kernels=kernels.name,
            isa=kernels.isa,
            library=None if kernels.library is None else str(kernels.library),
            reason=kernels.reason,
        )
        self._writer.write("device", info)
        self._writer.write("runtime", runtime)

    def has_model(self, model: nn.Module) -> None:
        """Describe the loaded model, and the draft model that is a part of it."""
        model_info = _model_info(self._config, weight_bytes(model), quantized_summary(model))
        self._writer.write("model", model_info)
        heads, speculation = draft_model(model), self._config.speculative_config
        if heads is not None and speculation is not None:
            info = DraftModelInfo(
                name=speculation.draft_model_config.model,
                method=str(speculation.method),
                drafts=speculation.num_speculative_tokens,
                weight_bytes=weight_bytes(heads),
            )
            self._writer.write("draft_model", info)
            logger.info(
                "Draft model: %s (%s), %d drafts a step", info.name, info.method, info.drafts
            )
        self._writer.write("phases", _phase_seconds(self._board))

    def has_adapters(self, num_bytes: int) -> None:
        """Describe the adapter slots, which take ``num_bytes``."""
        lora = self._config.lora_config
        assert lora is not None
        info = LoraInfo(max_loras=lora.max_loras, max_lora_rank=lora.max_lora_rank, bytes=num_bytes)
        self._writer.write("lora", info)

    def has_experts(self, experts: ExpertsInfo) -> None:
        self._writer.write("experts", experts)

    def records_usage(self, file: Path) -> None:
        self._writer.write("buckets", _buckets_info(self._config, str(file)))

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
        self._writer.write("kv", KvInfo(bytes=num_bytes, groups=groups))
        transfer = self._config.kv_transfer_config
        if transfer is not None:
            self._writer.write("kv_transfer", transfer_info(transfer))

    def is_ready(self) -> None:
        """Describe graphs, store, phases and memory after the warm-up; nothing is written later."""
        rbln, board = self._rbln, self._board
        requests = {
            result: int(board.value("rbln_compile_cache_requests_total", result=result))
            for result in ("hit", "miss", "corrupt")
        }
        cache = CacheInfo(
            root=str(Path(rbln.cache_root) / "rbln" / "graphs"),
            enabled=not rbln.disable_compile_cache,
            read_only=rbln.cache_read_only,
            max_bytes=rbln.cache_max_bytes,
            hits=requests["hit"],
            misses=requests["miss"],
            corrupt=requests["corrupt"],
            entries=int(board.value("rbln_compile_cache_entries")),
            bytes=int(board.value("rbln_compile_cache_size_bytes")),
        )
        self._writer.write("cache", cache)
        self._writer.write("phases", _phase_seconds(self._board))
        if self._runtime is not None:
            on_huge_pages = huge_page_bytes()
            runtime = dataclasses.replace(self._runtime, huge_page_bytes=on_huge_pages)
            self._writer.write("runtime", runtime)


def _model_info(
    config: VllmConfig, weight_bytes: int | None, quantized_layers: str | None
) -> ServedModelInfo:
    """Return the served model; ``weight_bytes`` is None until the weights are loaded."""
    model = config.model_config
    return ServedModelInfo(
        name=model.model,
        architecture=model.architecture,
        runner=model.runner_type,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        quantized_layers=quantized_layers,
        weight_bytes=weight_bytes,
    )


def _buckets_info(config: VllmConfig, usage_file: str | None) -> BucketsInfo:
    sizes = compiled_sizes(config)
    return BucketsInfo(
        decode=list(sizes.decode or ()), prefill=list(sizes.chunks), usage_file=usage_file
    )


def _phase_seconds(board: MetricsBoard) -> dict[str, float]:
    seconds_by_phase = {phase: board.value(PHASE_SECONDS, phase=phase) for phase in _PHASES}
    return {phase: round(seconds, 3) for phase, seconds in seconds_by_phase.items() if seconds}
