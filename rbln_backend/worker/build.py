"""Assembly of one rank's parts once the KV cache is known, and their warm-up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.logits_processor import build_logitsprocs

from rbln_backend.collectives import groups
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.port import CompiledGraph, Compiler, installed_sdk
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.kv_cache.tensors import KvCaches, sharing_layers
from rbln_backend.layers.encoder import EncoderAttentionImpl
from rbln_backend.layers.moe import TOKENS_MASK, moe_methods
from rbln_backend.reports.metrics import BatchSizeLog, MetricsBoard
from rbln_backend.reports.progress import ProgressWriter, RankPlace
from rbln_backend.settings import compiled_sizes, configured, largest_decode
from rbln_backend.worker.batch import IsolatedInputBatch, RequestBatches
from rbln_backend.worker.device_sampler import DeviceSampler
from rbln_backend.worker.draft_runs import make_source
from rbln_backend.worker.drafting import Drafting, DraftSource
from rbln_backend.worker.graph_factory import (
    GraphFactory,
    GraphRequest,
    Result,
    cache_fields,
    get_workers,
    named_tensors,
)
from rbln_backend.worker.graph_functions import GraphFunction, forbid_missing_tokens, whole_part
from rbln_backend.worker.graph_set import (
    ADAPTER_PRODUCT,
    LM_HEAD,
    GraphDispatch,
    GraphSet,
    LmHead,
    StepGraph,
)
from rbln_backend.worker.inputs import AdapterRows, LongestFirst, StepInputs, kv_groups
from rbln_backend.worker.metrics import StepMetrics, open_store, open_usage
from rbln_backend.worker.pooling import HostPooler, PoolingRunner, TokenTypes
from rbln_backend.worker.preflight import attention_layers, bucket_tables
from rbln_backend.worker.ranks import DataRanks, PipelineStage, intermediate_buffers, stage_part
from rbln_backend.worker.runner import (
    Launch,
    LaunchInThread,
    RblnModelRunner,
    RelayRunner,
    launch_on_device,
)
from rbln_backend.worker.sampling import (
    GrammarMask,
    KernelPicks,
    KernelSampler,
    PromptLogprobs,
    RowSampler,
    TokenPicks,
    picked_by_graph,
)
from rbln_backend.worker.verification import Verification
from rbln_backend.worker.warmup import SlotProof, WarmUp

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters

logger = init_logger(__name__)

Runner = RblnModelRunner | PoolingRunner | RelayRunner


class EngineBuild:
    """The way from the loaded model to a running step loop, in three phases.

    ``__init__`` allocates: KV caches, the buffers of every graph, what makes graphs. ``warm_up``
    compiles or loads the graphs and runs them; then ``_make_runner`` makes the step loop.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        model: nn.Module,
        compiler: Compiler,
        board: MetricsBoard,
        place: RankPlace,
        adapters: Adapters | None,
    ) -> None:
        """``adapters`` is None in an engine without adapters."""
        self._config, self._rbln = config, configured(config)
        self.kv_cache_config = kv_cache_config
        self._model, self._compiler, self._board = model, compiler, board
        self._place, self._adapters = place, adapters
        self._generates = config.model_config.runner_type == "generate"
        rbln, device = self._rbln, compiler.capabilities
        # Not the dtype of a parameter: a quantised model's first parameter may hold packed words.
        dtype: Any = config.model_config.dtype

        # The KV caches.
        layers = attention_layers(config)
        length = config.model_config.max_model_len
        self._groups = kv_groups(kv_cache_config, length, sharing_layers(layers))
        self.kv_caches = KvCaches.allocate(
            kv_cache_config, compiler.kv_memory, kv_outermost=rbln.use_custom_kernel
        )
        self.kv_caches.bind(layers)
        board.gauge("rbln_device_memory_bytes", kind="kv").set(self.kv_caches.num_bytes)

        # The part of the model on this rank, and the buffers of its steps' graphs.
        self._part = part = stage_part(model, dtype, whole_part(device, config))
        if self._generates and part.is_last:
            forbid_missing_tokens(model, config.model_config, runs_on_host=device.runs_on_host)
        self._moe = moe_methods(model)
        masks_tokens = bool(self._moe) and rbln.use_moe_tokens_mask
        make_inputs = partial(
            StepInputs.allocate,
            groups=self._groups,
            encoder_layers=_encoder_layers(config, layers),
            row_input=None if adapters is None else adapters.row_input,
            masked_ranks=config.parallel_config.data_parallel_size if masks_tokens else 0,
            intermediates=None if part.is_first else partial(intermediate_buffers, model, dtype),
        )
        tables, dispatch = bucket_tables(config), self._make_dispatch()
        self._graphs = GraphSet.allocate(
            tables,
            dispatch,
            make_inputs,
            verify=compiled_sizes(config).verify,
            prompts=rbln.chunk_prompts,
        )

        # Graphs beside those of steps: of a draft model, of the LM head, of the test of slots.
        self._drafts: DraftSource | None = None
        self._others: dict[GraphSpec, GraphRequest] = {}
        if part.is_last:
            whole_inputs = partial(make_inputs, intermediates=None)
            self._drafts = make_source(config, self._groups, whole_inputs, dispatch, model)
            if self._drafts is not None:
                self._others |= self._drafts.graphs
        self._lm_head = LmHead(config.model_config.get_hidden_size(), dtype, dispatch, adapters)
        if self._generates and part.is_last:
            self._others[LM_HEAD] = GraphRequest(LM_HEAD, self._lm_head.inputs, None)
        self._slot_proof: SlotProof | None = None
        if adapters is not None and not device.runs_on_host:
            self._slot_proof = SlotProof(adapters)
            self._others[ADAPTER_PRODUCT] = GraphRequest(
                ADAPTER_PRODUCT, self._slot_proof.inputs, None
            )

        # What makes graphs of these.
        self._store = open_store(rbln, board)
        self._factory = GraphFactory(
            model=model,
            compiler=compiler,
            table=named_tensors(model, layers, self.kv_caches, adapters),
            store=self._store,
            key_fields=cache_fields(config, rbln, self._groups),
            forward_context=self._forward_context,
            part=part,
            capture_workers=get_workers(compiler, place.local_ranks),
        )
        self._draws: DeviceSampler | None = None
        if rbln.sample_on_device:
            self._draws = DeviceSampler(str(getattr(installed_sdk(), "__version__", "0")))

        counts = self._generates and place.counts_steps
        self._usage = open_usage(config, compiler, self._groups, tables) if counts else None
        interval_s = rbln.log_batchsize_interval
        self._sizes = BatchSizeLog(interval_s) if counts and interval_s >= 0 else None

    @property
    def usage_file(self) -> Path | None:
        return None if self._usage is None else self._usage.path

    def close(self) -> None:
        """Write the counts that are only in memory."""
        if self._usage is not None:
            self._usage.close()
        if self._sizes is not None:
            self._sizes.log()

    def warm_up(self, progress: ProgressWriter) -> Runner:
        """Compile or load every graph, run each once, then reject unknown shapes."""
        if self._rbln.enable_warm_up:
            # Ranks of the same stage have collectives in common; those of experts in all engines.
            ranks = groups().get("ep") or groups().get("tp")
            self._warm_up_graphs(WarmUp(progress, self._board, ranks, self._draws))
        else:
            logger.warning(
                "Warm-up is off (VLLM_RBLN_ENABLE_WARM_UP): each graph is compiled by the first "
                "request that needs it"
            )
        return self._make_runner()

    def observe(
        self,
        function: Callable[[Phase], tuple[GraphFunction, tuple[str, ...]]],
        wrap: Callable[[StepGraph], CompiledGraph],
    ) -> None:
        """Replace every graph by one with more outputs, for tools that inspect a model.

        ``function`` returns what to capture for a phase, and the names of its inputs; ``wrap`` a
        graph with the outputs that the step loop expects. None is stored. Raises ``CompileError``.
        """
        for spec, inputs in self._graphs.inputs.items():
            graph = self._factory.build_other(self._request(spec), *function(spec.phase))
            self._graphs.exchange(wrap(StepGraph(spec, inputs, graph)))

    def fill_store(self, progress: ProgressWriter) -> tuple[dict[str, Result], list[str]]:
        """Compile the graphs that the store lacks and run none; weights need no values.

        Returns "compiled" or "loaded" by graph, and the graphs that could not be stored, with
        ``binaries`` if those could not.
        """
        requests = self._requests()
        warm_up = WarmUp(progress, self._board)
        make = warm_up.compile_all if self._factory.compiles_when_loading else warm_up.obtain_all
        make(requests, self._factory)
        specs = [request.spec for request in requests]
        missing = [str(spec) for spec in specs if not self._factory.is_stored(spec)]
        if not self._factory.has_binaries(specs):
            missing.append("binaries")
        return warm_up.results, missing

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
            # Manifests are not read: a store may have a thousand.
            sizes = self._store.sizes()
            self._board.gauge("rbln_compile_cache_entries").set(len(sizes))
            self._board.gauge("rbln_compile_cache_size_bytes").set(sum(sizes))

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

        counter, name = self._board.counter, "rbln_recompiles_after_warmup_total"
        misses = {phase: counter(name, kind=phase.value) for phase in Phase}
        return GraphDispatch(
            compile_late,
            policy=self._rbln.hot_path_policy,
            on_miss=lambda spec: misses[spec.phase].inc(),
        )

    def _forward_context(self, request: GraphRequest) -> AbstractContextManager[None]:
        if self._adapters is not None:
            self._adapters.read_by(request.inputs)
        for method in self._moe:
            method.tokens_mask = request.inputs.get(TOKENS_MASK)
        config, rows = self._config, request.spec.batch_size * request.spec.query_len
        everywhere = torch.full((config.parallel_config.data_parallel_size,), rows)
        return set_forward_context(request.metadata, config, rows, everywhere, slot_mapping={})

    def _make_runner(self) -> Runner:
        config, place, part, board = self._config, self._place, self._part, self._board
        on_host = self._compiler.capabilities.runs_on_host
        batches = RequestBatches(
            self._input_batch, largest_decode(config), self._graphs.prompts, samples=part.is_last
        )
        metrics = StepMetrics(
            board.only_if(place.counts_steps),
            list(self._graphs.inputs),
            self._usage,
            self._sizes,
            engine=place.engine,
        )
        # The order that the device's decode kernels need.
        rows = LongestFirst() if self._compiler.capabilities.longest_first else None
        adapters: AdapterRows | None = None
        if self._adapters is not None:
            self._adapters.serve(batches.adapter_ids)
            adapters = AdapterRows(self._adapters, rows)
        launch: Launch | None = None
        if config.scheduler_config.async_scheduling and place.replies:
            # A rank that does not reply to the engine has nothing to do beside a step: it ends each
            # step where it began, so that a failure ends its process instead of leaving the others
            # waiting.
            launch = LaunchInThread() if on_host else launch_on_device
        has_stages = get_pp_group().world_size > 1
        # Engines of a dense model need no agreement between them.
        has_ranks = config.parallel_config.data_parallel_size > 1
        step: dict[str, Any] = {
            "batches": batches,
            "graphs": self._graphs,
            "kv_caches": self.kv_caches,
            "metrics": metrics,
            "part": part,
            "adapters": adapters,
            "stage": PipelineStage(part, groups()["pp"]) if has_stages else None,
            "ranks": DataRanks(groups()["dp"]) if has_ranks else None,
            "rows": rows,
            "launch": launch,
        }
        if not part.is_last:
            return RelayRunner(**step)
        if not self._generates:
            caching = bool(config.cache_config.enable_prefix_caching)
            pooler = HostPooler(self._model, reuses_prefixes=caching)
            return PoolingRunner(pooler, TokenTypes(self._model), **step)
        sampler_class = KernelSampler if on_host else RowSampler
        sampler = sampler_class(logprobs_mode=config.model_config.logprobs_mode)
        picks: TokenPicks | None = KernelPicks() if on_host else None
        vocab_size = config.model_config.get_vocab_size()
        board = board.only_if(place.replies)
        drafting: Drafting | None = None
        # Without a draft model the rank that replies drafts alone.
        if config.speculative_config is not None and (place.replies or self._drafts is not None):
            verify = self._graphs.verify
            drafting = Drafting(config, batches, board, table=verify, source=self._drafts)
        return RblnModelRunner(
            sampler=sampler,
            picks=picked_by_graph if part.picks_tokens else picks,
            draws=self._draws,
            prompt_logprobs=PromptLogprobs(sampler, self._lm_head, vocab_size),
            grammar_mask=GrammarMask(board),
            verification=Verification(sampler, batches, is_picked=part.picks_tokens),
            drafting=drafting,
            **step,
        )

    def _input_batch(self, rows: int) -> IsolatedInputBatch:
        config, device = self._config, torch.device("cpu")
        # With speculation, vLLM would leave logits processors out.
        plain = copy.copy(config)
        plain.speculative_config = None
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
                plain, device, False, False, config.model_config.logits_processors or ()
            ),
        )


def _encoder_layers(config: VllmConfig, layers: Mapping[str, Any]) -> list[str]:
    """Return the layers without a KV cache; raises ``UnsupportedModelError`` for a decoder."""
    impls = {name: layer.impl for name, layer in layers.items()}
    names = [name for name, impl in impls.items() if isinstance(impl, EncoderAttentionImpl)]
    if names and config.model_config.attn_type != "encoder_only":
        # Its prompts would be split into chunks that cannot attend to each other.
        raise UnsupportedModelError(
            f"layer {names[0]!r} attends in both directions, but the model is served as a decoder;"
            " serve it with --runner pooling"
        )
    return names
