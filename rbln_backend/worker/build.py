"""Assembly of one rank's parts once the KV cache is known, and their warm-up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from rbln_backend.attention.encoder import EncoderAttentionImpl
from rbln_backend.compiler.device import installed_sdk
from rbln_backend.compiler.port import CompiledGraph, Compiler
from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.kv_cache.tensors import KvCaches, sharing_layers
from rbln_backend.moe.layers import moe_methods
from rbln_backend.moe.paths import TOKENS_MASK
from rbln_backend.parallel.peers import Peers
from rbln_backend.parallel.stages import largest_decode
from rbln_backend.reporting.progress import ProgressWriter
from rbln_backend.reporting.ranks import RankPlace
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.vllm_compat.surface import (
    KVCacheConfig,
    VllmConfig,
    build_logitsprocs,
    compiled_sizes,
    init_logger,
    set_forward_context,
)
from rbln_backend.worker.batch import IsolatedInputBatch, RequestBatches
from rbln_backend.worker.device_sampler import DeviceSampler
from rbln_backend.worker.draft_runs import make_source
from rbln_backend.worker.drafting import DraftSource, make_drafting
from rbln_backend.worker.graph_factory import (
    GraphFactory,
    GraphRequest,
    Result,
    cache_fields,
    named_tensors,
    workers_of,
)
from rbln_backend.worker.graph_functions import (
    GraphFunction,
    forbid_missing_tokens,
    whole_part,
)
from rbln_backend.worker.graph_set import (
    ADAPTER_PRODUCT,
    LM_HEAD,
    GraphDispatch,
    GraphSet,
    LmHead,
    StepGraph,
)
from rbln_backend.worker.group_inputs import kv_groups
from rbln_backend.worker.inputs import AdapterRows, RowOrder, StepInputs, row_order
from rbln_backend.worker.metrics import (
    StepMetrics,
    open_size_log,
    open_store,
    open_usage,
    report_store_size,
)
from rbln_backend.worker.pooling import HostPooler, PoolingRunner, TokenTypes
from rbln_backend.worker.preflight import bucket_tables
from rbln_backend.worker.ranks import intermediate_buffers, make_agreement, make_stage
from rbln_backend.worker.runner import RblnModelRunner, RelayRunner, step_loop
from rbln_backend.worker.sampling import GrammarMask, PromptLogprobs, make_picks, make_sampler
from rbln_backend.worker.verification import Verification
from rbln_backend.worker.warmup import SlotProof, WarmUp

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters

logger = init_logger(__name__)


Runner = RblnModelRunner | PoolingRunner | RelayRunner


@dataclass(frozen=True)
class EngineParts:
    """The worker's objects from before the KV cache is known."""

    vllm_config: VllmConfig
    rbln: RblnConfig
    model: nn.Module
    compiler: Compiler
    attention_layers: Mapping[str, Any]
    board: MetricsBoard
    place: RankPlace
    adapters: Adapters | None = None


class GraphObserver(Protocol):
    """Replaces graphs by ones with more outputs, for tools that inspect a model."""

    def function(self, phase: Phase) -> tuple[GraphFunction, tuple[str, ...]]:
        """Return the function to capture for ``phase``, and the names of its inputs."""
        ...

    def wrap(self, step: StepGraph) -> CompiledGraph:
        """Return a graph with the outputs that the step loop expects."""
        ...


class FilledStore(NamedTuple):
    """The result of a precompilation."""

    results: Mapping[str, Result]
    """"compiled" or "loaded" by graph."""
    missing: Sequence[str]
    """Graphs that could not be stored, and ``binaries`` if those could not."""


class EngineBuild:
    """The objects between the loaded model and a running step loop."""

    def __init__(self, parts: EngineParts, kv_cache_config: KVCacheConfig) -> None:
        config, rbln = parts.vllm_config, parts.rbln
        self._parts, self.kv_cache_config = parts, kv_cache_config
        self._generates = config.model_config.runner_type == "generate"
        sharing = sharing_layers(parts.attention_layers)
        length = config.model_config.max_model_len
        self._groups = kv_groups(kv_cache_config, length, sharing)
        self._moe = moe_methods(parts.model)
        self.kv_caches = KvCaches.allocate(
            kv_cache_config, parts.compiler.kv_memory, kv_outermost=rbln.use_custom_kernel
        )
        self.kv_caches.bind(parts.attention_layers)
        parts.board.gauge("rbln_device_memory_bytes", kind="kv").set(self.kv_caches.num_bytes)
        dispatch = self._make_dispatch()
        tables = bucket_tables(config)
        # Not the dtype of a parameter: a quantised model's first parameter may hold packed words.
        dtype: Any = config.model_config.dtype
        self._stage = make_stage(
            parts.model, dtype, whole_part(parts.compiler.capabilities, config)
        )
        if self._generates and self._stage.part.is_last:
            on_host = parts.compiler.capabilities.runs_on_host
            forbid_missing_tokens(parts.model, config.model_config, runs_on_host=on_host)
        self._agreement = make_agreement(config)
        masks_tokens = bool(self._moe) and rbln.use_moe_tokens_mask
        is_first = self._stage.part.is_first
        make_inputs = partial(
            StepInputs.allocate,
            groups=self._groups,
            encoder_layers=_encoder_layers(parts),
            row_input=None if parts.adapters is None else parts.adapters.row_input,
            masked_ranks=self._agreement.ranks if masks_tokens else 0,
            intermediates=None if is_first else partial(intermediate_buffers, parts.model, dtype),
        )
        self._graphs = GraphSet.allocate(
            *(tables, dispatch, make_inputs),
            verify=compiled_sizes(config).verify,
            prompts=rbln.chunk_prompts,
        )
        size = config.model_config.get_hidden_size()
        self._lm_head = LmHead(size, dtype, dispatch, parts.adapters)
        self._drafts: DraftSource | None = None
        if self._stage.part.is_last:
            own_inputs = partial(make_inputs, intermediates=None)
            self._drafts = make_source(config, self._groups, own_inputs, dispatch, parts.model)
        self._others = {**self._drafts.graphs} if self._drafts is not None else {}
        if self._generates and self._stage.part.is_last:
            self._others[LM_HEAD] = GraphRequest(LM_HEAD, self._lm_head.inputs, None)
        self._slot_proof: SlotProof | None = None
        if parts.adapters is not None and not parts.compiler.capabilities.runs_on_host:
            self._slot_proof = SlotProof(parts.adapters)
            self._others[ADAPTER_PRODUCT] = GraphRequest(
                ADAPTER_PRODUCT, self._slot_proof.inputs, None
            )
        self._store = open_store(rbln, parts.board)
        self._factory = self._make_factory()
        self._draws: DeviceSampler | None = None
        if rbln.sample_on_device:
            self._draws = DeviceSampler(str(getattr(installed_sdk(), "__version__", "0")))
        counts = self._generates and parts.place.counts_steps
        own = (config, parts.compiler, self._groups, tables)
        self._usage = open_usage(*own) if counts else None
        self._sizes = open_size_log(rbln) if counts else None

    @property
    def usage_file(self) -> Path | None:
        """The file with the counts of step sizes."""
        return None if self._usage is None else self._usage.path

    def close(self) -> None:
        """Write the counts that are only in memory."""
        if self._usage is not None:
            self._usage.close()
        if self._sizes is not None:
            self._sizes.log()

    def warm_up(self, progress: ProgressWriter) -> Runner:
        """Compile or load every graph, run each once, then reject unknown shapes."""
        if self._parts.rbln.enable_warm_up:
            peers = Peers.of_this_rank()
            self._warm_up_graphs(WarmUp(progress, self._parts.board, peers, self._draws))
        else:
            logger.warning(
                "Warm-up is off (VLLM_RBLN_ENABLE_WARM_UP): each graph is compiled by the first "
                "request that needs it"
            )
        return self._make_runner()

    def observe(self, observer: GraphObserver) -> None:
        """Replace every graph by one of the observer's function; none of them is stored.

        Raises ``CompileError``.
        """
        for spec, inputs in self._graphs.inputs.items():
            graph = self._factory.build_other(self._request(spec), *observer.function(spec.phase))
            self._graphs.exchange(observer.wrap(StepGraph(spec, inputs, graph)))

    def fill_store(self, progress: ProgressWriter) -> FilledStore:
        """Compile the graphs that the store lacks and run none; weights need no values."""
        requests = self._requests()
        warm_up = WarmUp(progress, self._parts.board)
        make = warm_up.compile_all if self._factory.compiles_when_loading else warm_up.obtain_all
        make(requests, self._factory)
        specs = [request.spec for request in requests]
        missing = [str(spec) for spec in specs if not self._factory.is_stored(spec)]
        if not self._factory.has_binaries(specs):
            missing.append("binaries")
        return FilledStore(warm_up.results, missing)

    def _requests(self) -> list[GraphRequest]:
        return [self._request(spec) for spec in (*self._graphs.inputs, *self._others)]

    def _warm_up_graphs(self, warm_up: WarmUp) -> None:
        graphs = warm_up.compile_all(self._requests(), self._factory)
        with torch.inference_mode():
            warm_up.run_all(graphs)
        if self._slot_proof is not None:
            self._slot_proof.run({graph.spec: graph for graph in graphs}, self._graphs.inputs)
        for graph in graphs:
            self._graphs.dispatch.add(graph)
        self._graphs.dispatch.seal()
        if self._store is not None:
            report_store_size(self._parts.board, self._store)

    def _request(self, spec: GraphSpec) -> GraphRequest:
        if spec in self._others:
            return self._others[spec]
        step_inputs = self._graphs.inputs[spec]
        return GraphRequest(spec, step_inputs.tensors, step_inputs.metadata)

    def _make_dispatch(self) -> GraphDispatch:
        def compile_late(spec: GraphSpec) -> CompiledGraph:
            graph, _, seconds = self._factory.build(self._request(spec))
            logger.warning("[HOT PATH] graph %s was made in %.2f s while serving", spec, seconds)
            return graph

        counter, name = self._parts.board.counter, "rbln_recompiles_after_warmup_total"
        misses = {phase: counter(name, kind=phase.value) for phase in Phase}
        return GraphDispatch(
            compile_late,
            policy=self._parts.rbln.hot_path_policy,
            on_miss=lambda spec: misses[spec.phase].inc(),
        )

    def _make_factory(self) -> GraphFactory:
        parts = self._parts
        layers, adapters = parts.attention_layers, parts.adapters
        return GraphFactory(
            model=parts.model,
            compiler=parts.compiler,
            table=named_tensors(parts.model, layers, self.kv_caches, adapters),
            store=self._store,
            key_fields=cache_fields(parts.vllm_config, parts.rbln, self._groups),
            forward_context=self._forward_context,
            part=self._stage.part,
            capture_workers=workers_of(parts.compiler, parts.place.local_ranks),
        )

    def _forward_context(self, request: GraphRequest) -> AbstractContextManager[None]:
        if self._parts.adapters is not None:
            self._parts.adapters.read_by(request.inputs)
        for method in self._moe:
            method.tokens_mask = request.inputs.get(TOKENS_MASK)
        config, rows = self._parts.vllm_config, request.spec.batch_size * request.spec.query_len
        everywhere = torch.full((config.parallel_config.data_parallel_size,), rows)
        return set_forward_context(*(request.metadata, config, rows, everywhere), slot_mapping={})

    def _make_runner(self) -> Runner:
        config = self._parts.vllm_config
        is_last = self._stage.part.is_last
        most, prompts = largest_decode(config), self._graphs.prompts
        batches = RequestBatches(self._input_batch, most, prompts, samples=is_last)
        place, specs = self._parts.place, list(self._graphs.inputs)
        counts = self._parts.board.only_if(place.counts_steps)
        metrics = StepMetrics(counts, specs, self._usage, self._sizes, engine=place.engine)
        runs_on_host = self._parts.compiler.capabilities.runs_on_host
        loop = step_loop(config, runs_on_host=runs_on_host, replies=place.replies)
        rows = row_order(self._parts.compiler.capabilities)
        steps = loop.steps(
            batches=batches,
            adapters=self._adapter_rows(batches, rows),
            graphs=self._graphs,
            kv_caches=self.kv_caches,
            metrics=metrics,
            stage=self._stage,
            agreement=self._agreement,
            rows=rows,
        )
        if not is_last:
            return RelayRunner(steps)
        if not self._generates:
            caching, model = bool(config.cache_config.enable_prefix_caching), self._parts.model
            return PoolingRunner(
                steps, HostPooler(model, reuses_prefixes=caching), TokenTypes(model)
            )
        sampler = make_sampler(config.model_config.logprobs_mode, runs_on_host=runs_on_host)
        vocab_size = config.model_config.get_vocab_size()
        board = self._parts.board.only_if(place.replies)
        return loop.runner(
            steps=steps,
            sampler=sampler,
            picks=make_picks(by_graph=self._stage.part.picks_tokens, runs_on_host=runs_on_host),
            draws=self._draws,
            prompt_logprobs=PromptLogprobs(sampler, self._lm_head, vocab_size),
            grammar_mask=GrammarMask(board),
            verification=Verification(sampler, batches, is_picked=self._stage.part.picks_tokens),
            drafting=make_drafting(
                config,
                batches,
                board,
                table=self._graphs.verify,
                replies=place.replies,
                source=self._drafts,
            ),
        )

    def _adapter_rows(self, batches: RequestBatches, rows: RowOrder) -> AdapterRows | None:
        if self._parts.adapters is None:
            return None
        self._parts.adapters.serve(batches.adapter_ids)
        return AdapterRows(self._parts.adapters, rows)

    def _input_batch(self, rows: int) -> IsolatedInputBatch:
        config, device = self._parts.vllm_config, torch.device("cpu")
        return IsolatedInputBatch(
            max_num_reqs=rows,
            max_model_len=config.model_config.max_model_len,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            device=device,
            vocab_size=config.model_config.get_vocab_size(),
            block_sizes=[group.block_size for group in self._groups],
            kernel_block_sizes=[group.block_size for group in self._groups],
            max_num_blocks_per_req=[group.width for group in self._groups],
            is_pooling_model=not self._generates,
            logitsprocs=build_logitsprocs(
                *(_without_speculation(config), device, False, False),
                config.model_config.logits_processors or (),
            ),
        )


def _without_speculation(config: VllmConfig) -> VllmConfig:
    """Return ``config`` without speculation: with it, vLLM would leave logits processors out."""
    plain = copy.copy(config)
    plain.speculative_config = None
    return plain


def _encoder_layers(parts: EngineParts) -> list[str]:
    """Return the layers without a KV cache; raises ``UnsupportedModelError`` for a decoder."""
    layers = parts.attention_layers.items()
    names = [name for name, layer in layers if isinstance(layer.impl, EncoderAttentionImpl)]
    if names and parts.vllm_config.model_config.attn_type != "encoder_only":
        # Its prompts would be split into chunks that cannot attend to each other.
        raise UnsupportedModelError(
            f"layer {names[0]!r} attends in both directions, but the model is served as a decoder;"
            " serve it with --runner pooling"
        )
    return names
