"""Wires one rank's parts together once the KV cache is known, and warms them up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rbln_backend.attention.metadata import RblnAttentionMetadata
from rbln_backend.bucketing.table import BucketTable, decode_bucket_table, prefill_chunk_table
from rbln_backend.compiler.artifact_store import ArtifactStore
from rbln_backend.compiler.port import CompiledGraph, Compiler, GraphSpec, Phase
from rbln_backend.compiler.tensor_table import TensorTable
from rbln_backend.config import RblnConfig
from rbln_backend.kv_cache.layout import num_partitions
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.progress import ProgressWriter
from rbln_backend.stats import MetricsBoard
from rbln_backend.vllm_compat.surface import (
    InputBatch,
    KVCacheConfig,
    Sampler,
    VllmConfig,
    build_logitsprocs,
    init_logger,
    set_forward_context,
)
from rbln_backend.worker.cache_fields import cache_fields
from rbln_backend.worker.graph_dispatch import GraphDispatch
from rbln_backend.worker.graph_factory import GraphFactory
from rbln_backend.worker.lm_head import LmHead
from rbln_backend.worker.model_runner import RblnModelRunner
from rbln_backend.worker.prompt_logprobs import PromptLogprobs
from rbln_backend.worker.request_batches import RequestBatches
from rbln_backend.worker.step_inputs import StepInputs
from rbln_backend.worker.step_metrics import StepMetrics
from rbln_backend.worker.store_metrics import report_store_size, store_event_recorder
from rbln_backend.worker.warmup import WarmUp
from rbln_backend.worker.warmup_plan import plan

logger = init_logger(__name__)


@dataclass
class EngineBuild:
    """Everything between the loaded model and a running step loop."""

    rbln: RblnConfig
    specs: list[GraphSpec]
    prefill_chunks: BucketTable
    decode_buckets: BucketTable
    inputs: dict[GraphSpec, StepInputs]
    factory: GraphFactory
    store: ArtifactStore | None
    dispatch: GraphDispatch
    batches: RequestBatches
    sampler: Sampler
    lm_head: LmHead
    kv_caches: KvCaches
    board: MetricsBoard
    vocab_size: int

    def warm_up(self, progress: ProgressWriter) -> RblnModelRunner:
        """Compile or load every graph, run each once, then refuse unknown shapes."""
        if self.rbln.enable_warm_up:
            warm_up = WarmUp(progress, self.board)
            graphs = warm_up.compile_all(self.specs, self.build_graph)
            self.factory.release_originals()
            with torch.inference_mode():
                warm_up.run_all(graphs)
            for graph in graphs:
                self.dispatch.add(graph)
            self.dispatch.seal()
            if self.store is not None:
                report_store_size(self.board, self.store)
        else:
            logger.warning(
                "Warm-up is off (VLLM_RBLN_ENABLE_WARM_UP): each graph is compiled by the first "
                "request that needs it"
            )
        return self._make_runner()

    def build_graph(self, spec: GraphSpec) -> tuple[CompiledGraph, str, float]:
        if spec.phase is Phase.LOGITS:
            return self.factory.build(spec, self.lm_head.inputs, None)
        step_inputs = self.inputs[spec]
        return self.factory.build(spec, step_inputs.tensors, step_inputs.metadata)

    def _make_runner(self) -> RblnModelRunner:
        return RblnModelRunner(
            batches=self.batches,
            prefill_chunks=self.prefill_chunks,
            decode_buckets=self.decode_buckets,
            inputs=self.inputs,
            dispatch=self.dispatch,
            sampler=self.sampler,
            prompt_logprobs=PromptLogprobs(self.sampler, self.lm_head, self.vocab_size),
            kv_caches=self.kv_caches,
            metrics=StepMetrics(self.board, list(self.inputs)),
        )


def build_engine(
    *,
    vllm_config: VllmConfig,
    rbln: RblnConfig,
    model: nn.Module,
    compiler: Compiler,
    attention_layers: Mapping[str, Any],
    kv_cache_config: KVCacheConfig,
    board: MetricsBoard,
) -> EngineBuild:
    """Allocate the KV cache and the input buffers and connect the parts; compiles nothing."""
    model_config, scheduler_config = vllm_config.model_config, vllm_config.scheduler_config
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    partitions = num_partitions(model_config.max_model_len, block_size)
    kv_caches = KvCaches.allocate(kv_cache_config, kv_outermost=rbln.use_custom_kernel)
    kv_caches.bind(attention_layers)
    board.gauge("rbln_device_memory_bytes", kind="kv").set(kv_caches.num_bytes)

    prefill_chunks = prefill_chunk_table(rbln, scheduler_config.max_num_batched_tokens)
    decode_buckets = decode_bucket_table(rbln, scheduler_config.max_num_seqs)
    specs = plan(prefill_chunks, decode_buckets, has_logits=True)
    inputs = {
        spec: StepInputs.allocate(
            spec,
            num_partitions=partitions,
            block_size=block_size,
            one_block=block_size == model_config.max_model_len,
        )
        for spec in specs
        if spec.phase is not Phase.LOGITS
    }
    store = _artifact_store(rbln, board)
    factory = GraphFactory(
        model=model,
        compiler=compiler,
        table=_tensor_table(model, attention_layers, kv_caches),
        store=store,
        key_fields=cache_fields(vllm_config, rbln, partitions),
        forward_context=lambda metadata: _forward_context(vllm_config, metadata),
    )
    build: EngineBuild

    def compile_late(spec: GraphSpec) -> CompiledGraph:
        graph, _, seconds = build.build_graph(spec)
        logger.warning("[HOT PATH] graph %s was made in %.2f s while serving", spec, seconds)
        return graph

    def count_miss(spec: GraphSpec) -> None:
        board.counter("rbln_recompiles_after_warmup_total", kind=spec.phase_name).inc()

    for phase in Phase:
        board.counter("rbln_recompiles_after_warmup_total", kind=phase.value)
    dispatch = GraphDispatch(compile_late, policy=rbln.hot_path_policy, on_miss=count_miss)
    build = EngineBuild(
        rbln=rbln,
        specs=specs,
        prefill_chunks=prefill_chunks,
        decode_buckets=decode_buckets,
        inputs=inputs,
        factory=factory,
        store=store,
        dispatch=dispatch,
        batches=RequestBatches(
            lambda rows: _input_batch(vllm_config, rows, block_size, partitions),
            scheduler_config.max_num_seqs,
        ),
        sampler=Sampler(logprobs_mode=model_config.logprobs_mode),
        lm_head=LmHead(model_config.get_hidden_size(), model_config.dtype, dispatch),
        kv_caches=kv_caches,
        board=board,
        vocab_size=model_config.get_vocab_size(),
    )
    return build


def _tensor_table(
    model: nn.Module, attention_layers: Mapping[str, Any], kv_caches: KvCaches
) -> TensorTable:
    table = TensorTable(lambda weight: torch.ops.rbln_emulator.pack_linear_weight(weight))
    table.add_model(model)
    for name, layer in attention_layers.items():
        table.add(f"scale:{name}", layer.impl.scale_tensor)
    for name, cache in kv_caches.tensors.items():
        table.add(f"kv:{name}", cache)
    return table


def _artifact_store(rbln: RblnConfig, board: MetricsBoard) -> ArtifactStore | None:
    record = store_event_recorder(board)
    if rbln.disable_compile_cache:
        board.counter("rbln_compile_cache_requests_total", result="bypass").inc()
        return None
    return ArtifactStore(
        Path(rbln.cache_root) / "rbln" / "graphs",
        max_bytes=rbln.cache_max_bytes,
        read_only=rbln.cache_read_only,
        on_event=record,
    )


def _forward_context(
    vllm_config: VllmConfig, metadata: RblnAttentionMetadata | None
) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = set_forward_context(
        metadata, vllm_config, slot_mapping={}
    )
    return context


def _input_batch(
    vllm_config: VllmConfig, rows: int, block_size: int, partitions: int
) -> InputBatch:
    model_config = vllm_config.model_config
    device = torch.device("cpu")
    return InputBatch(
        max_num_reqs=rows,
        max_model_len=model_config.max_model_len,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        device=device,
        vocab_size=model_config.get_vocab_size(),
        block_sizes=[block_size],
        kernel_block_sizes=[block_size],
        max_num_blocks_per_req=[partitions],
        logitsprocs=build_logitsprocs(
            vllm_config, device, False, False, model_config.logits_processors or ()
        ),
    )

