"""One rank of the engine: the methods that vLLM's executor and the server call."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from rbln_backend.collectives import groups, init_process_groups
from rbln_backend.config import RANKS_EXECUTOR, RblnConfig
from rbln_backend.devices.emulated.compiler import builds_kernels, make_emulated_compiler
from rbln_backend.devices.emulated.kernel_set import set_threads
from rbln_backend.devices.emulated.memory import choose_memory, keep_freed_memory
from rbln_backend.devices.layers import install_embedding, install_layers
from rbln_backend.devices.port import Compiler, device_capabilities, installed_sdk
from rbln_backend.devices.rebel.compiler import make_rebel_compiler, uses_npu_collectives
from rbln_backend.devices.rebel.environment import RankDevices, announce_rank, announce_threads
from rbln_backend.devices.rebel.limits import check_num_blocks
from rbln_backend.errors import AdapterError, ConfigError
from rbln_backend.host.processes import end_with_engine, end_with_parent, outlive_readers
from rbln_backend.host.resources import core_budget
from rbln_backend.kv_cache.plan import paged_bytes_per_block, plan_specs, window_bytes
from rbln_backend.kv_cache.specs import LayerSpec
from rbln_backend.kv_cache.tensors import sharing_layers
from rbln_backend.layers.moe import experts_info, install_expert_layers
from rbln_backend.limits import SLEEP
from rbln_backend.models import register as register_text_models
from rbln_backend.models.token_axes import keep_axes
from rbln_backend.reports.info import RuntimeInfo
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.reports.progress import ProgressWriter
from rbln_backend.settings import configured
from rbln_backend.vllm_patches import apply_patches, share_logging
from rbln_backend.worker.build import EngineBuild, Runner
from rbln_backend.worker.description import SelfDescription
from rbln_backend.worker.draft_model import add_draft_model, has_own_embedding
from rbln_backend.worker.memory import host_budget_bytes, npu_budget_bytes
from rbln_backend.worker.metrics import timed_phase
from rbln_backend.worker.pooling import pooling_tasks
from rbln_backend.worker.preflight import (
    Skeleton,
    attention_layers,
    check_layers,
    install_adapted_layers,
    install_latent_layers,
    kv_cache_specs,
    kv_limits,
    register_quantization,
    weight_bytes,
)
from rbln_backend.worker.ranks import rank_place
from rbln_backend.worker.runner import RblnModelRunner
from rbln_backend.worker.weights import CompleteLoader

if TYPE_CHECKING:
    from rbln_backend.lora.adapter_files import Target
    from rbln_backend.lora.adapters import Adapters
    from rbln_backend.worker.transfers import TransferRunner

logger = init_logger(__name__)


R = TypeVar("R")

_STEP_FAILED = 70


def _reports_failure(step: Callable[..., R]) -> Callable[..., R]:
    """Wrap a step of the start-up, so that the API process learns why it failed."""

    @functools.wraps(step)
    def run(worker: RblnWorker, *args: Any, **options: Any) -> R:
        with worker._progress.reporting_failure():
            return step(worker, *args, **options)

    return run


class RblnWorker(WorkerBase):
    """A rank: init_device, load_model, KV cache, warm-up, then execute_model, sample_tokens.

    The methods of adapters are available after ``load_model`` and raise ``AdapterError`` in an
    engine without ``--enable-lora``. A request is vLLM's ``LoRARequest``, or the list of its
    fields if it came through ``collective_rpc``.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        share_logging()
        # A spawned process has run no code of ours before.
        outlive_readers()
        end_with_parent()
        is_ranks = vllm_config.parallel_config.distributed_executor_backend == RANKS_EXECUTOR
        # A user's program may create an engine in any thread: there only vLLM's watch is used.
        if is_ranks and envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            end_with_engine()
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self._rbln = configured(vllm_config)
        self._place = rank_place(vllm_config, rank, local_rank)
        run_dir = Path(self._rbln.run_dir) if self._rbln.run_dir else None
        if run_dir is not None and not run_dir.is_dir():
            # Ray has placed the rank on another host: the API process cannot read its files.
            run_dir = None
        number = self._place.number
        # One rank writes to the terminal; the API process reads the progress of each.
        self._progress = ProgressWriter(run_dir, number, sys.stderr if number == 0 else None)
        self._board = MetricsBoard(run_dir, number)
        self._description = SelfDescription(run_dir, number, vllm_config, self._board)
        self._profiler: EmulatedProfiler | RebelProfiler | None = None
        self._model: nn.Module | None = None
        self._compiler: Compiler | None = None
        self._adapters: Adapters | None = None
        self._build: EngineBuild | None = None
        self._runner: Runner | TransferRunner | None = None
        self._transfer: TransferRunner | None = None

    @_reports_failure
    def init_device(self) -> None:
        self._progress.phase("init")
        self._description.started()
        apply_patches()
        self.device = torch.device("cpu")
        config, method = self.vllm_config, self.distributed_init_method
        with timed_phase(self._board, "init"):
            backend = self._announce_rank()
            init_process_groups(config, self.rank, method, self.local_rank, backend)
            self._compiler = self._make_compiler()
            self._compiler.join(groups())
        set_random_seed(self.model_config.seed)

    @_reports_failure
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._progress.phase("load", self.model_config.model)
        config, loader = self.vllm_config, self._loader
        with timed_phase(self._board, "load"), set_current_vllm_config(config):
            if load_dummy_weights:
                self.load_config.load_format = "dummy"
            register_text_models()
            register_quantization(config)
            install_adapted_layers(config)
            # Raises for unsupported models before any weight is read.
            check_layers(Skeleton(config), config, self._rbln)
            self._model = loader().load_model(config, self.model_config)
            self._adapters = self._make_adapters(self._model)
            add_draft_model(self._model, config, loader().load_model, has_own_embedding(config))
            if device_capabilities(self._rbln).keeps_axes:
                keep_axes(self._model)
        self._board.gauge("rbln_device_memory_bytes", kind="weights").set(weight_bytes(self._model))
        self._description.has_model(self._model)
        experts = experts_info(self._model, tokens_mask=self._rbln.use_moe_tokens_mask)
        if experts is not None:
            self._description.write("experts", experts)
            logger.info(
                "Experts: path %s (%s), %d of %d here",
                experts.path,
                experts.reason,
                experts.local,
                experts.experts,
            )

    def _loader(self) -> BaseModelLoader:
        loader = get_model_loader(self.load_config)
        # The loader of files, but no other of vLLM's.
        return CompleteLoader(self.load_config) if type(loader) is DefaultModelLoader else loader

    def _make_adapters(self, model: nn.Module) -> Adapters | None:
        if self.vllm_config.lora_config is None:
            return None
        from rbln_backend.lora.adapters import Adapters

        slots_used = self._board.gauge("rbln_lora_slots_used")
        assert self._compiler is not None
        adapters = Adapters(model, self.vllm_config, self._compiler, on_change=slots_used.set)
        slots_used.set(0)
        self._board.gauge("rbln_lora_slots").set(self.vllm_config.lora_config.max_loras)
        self._board.gauge("rbln_device_memory_bytes", kind="lora").set(adapters.layers.num_bytes)
        self._description.has_adapters(adapters.layers.num_bytes)
        return adapters

    def get_model(self) -> nn.Module:
        assert self._model is not None
        return self._model

    @_reports_failure
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return dict(self._layer_specs())

    def _layer_specs(self) -> dict[str, LayerSpec]:
        limits = kv_limits(self.vllm_config, self._rbln)
        shared = set(sharing_layers(attention_layers(self.vllm_config)).values())
        return plan_specs(kv_cache_specs(self.vllm_config), limits, shared)

    @_reports_failure
    def determine_available_memory(self) -> int:
        """Return the bytes of vLLM's pool of KV blocks, without those of window layers."""
        specs = list(self._layer_specs().values())
        per_block = paged_bytes_per_block(specs)
        for_windows = window_bytes(specs, self.scheduler_config.max_num_seqs)
        assert self._compiler is not None
        npu, model, config = self._compiler.capabilities.npu, self.get_model(), self.vllm_config
        if npu is not None and self.cache_config.kv_cache_memory_bytes is None:
            slots = 0 if self._adapters is None else self._adapters.layers.num_bytes
            budget = npu_budget_bytes(npu, config, model, specs, slots) - for_windows
        else:
            ranks = self._place.local_ranks
            budget = host_budget_bytes(config, model, ranks, per_block, for_windows)
        return budget if per_block else self._window_pool_bytes(specs)

    def _window_pool_bytes(self, specs: list[LayerSpec]) -> int:
        """Return the size of vLLM's pool for window layers only: nominal bytes of their blocks."""
        nominal = sum(spec.page_size_bytes for spec in specs)
        return (self.scheduler_config.max_num_seqs + 1) * nominal

    @_reports_failure
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        assert self._compiler is not None
        if self._compiler.capabilities.npu is not None:
            check_num_blocks(kv_cache_config.num_blocks)
        self._build = EngineBuild(
            self.vllm_config,
            kv_cache_config,
            model=self.get_model(),
            compiler=self._compiler,
            board=self._board,
            place=self._place,
            adapters=self._adapters,
        )
        self._description.has_kv_caches(kv_cache_config)
        logger.info(
            "KV cache: %d blocks of %d tokens; requests of %d tokens at most",
            kv_cache_config.num_blocks,
            self.cache_config.block_size,
            self.model_config.max_model_len,
        )
        if self._build.usage_file is not None:
            self._description.write_buckets(self._build.usage_file)

    @_reports_failure
    def compile_or_warm_up_model(self) -> CompilationTimes:
        assert self._build is not None
        started = time.perf_counter()
        self._runner = runner = self._build.warm_up(self._progress)
        if self.vllm_config.kv_transfer_config is not None:
            from rbln_backend.worker.transfers import SharedBlocks, TransferRunner

            assert isinstance(runner, RblnModelRunner), "checked by check_nixl"
            caches, kv_config = self._build.kv_caches, self._build.kv_cache_config
            blocks = SharedBlocks(caches.memory, caches.tensors)
            self._transfer = TransferRunner(runner, self.vllm_config, kv_config, blocks)
            self._runner = self._transfer
        keep_freed_memory()
        self._description.is_ready()
        self._progress.phase("ready")
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=time.perf_counter() - started, encoder=0.0)

    def synchronize_device(self) -> None:
        """Wait for the step that the device runs; with asynchronous scheduling alone one may."""
        if isinstance(self._runner, RblnModelRunner):
            self._runner.synchronize()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        assert self._runner is not None
        try:
            return self._runner.execute_model(scheduler_output)
        except Exception as error:
            self._exit_unless_replying(error)
            raise

    def sample_tokens(  # type: ignore[override]  # upstream's callers accept None, its type does not
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        assert self._runner is not None
        try:
            return self._runner.sample_tokens(grammar_output)
        except Exception as error:
            self._exit_unless_replying(error)
            raise

    def execute_dummy_batch(self) -> None:
        """Run padding. Called instead of ``execute_model`` while other data ranks have requests."""
        assert self._runner is not None
        self._runner.run_idle()

    def _exit_unless_replying(self, error: Exception) -> None:
        """Exit the process after a failed step on a rank that does not reply.

        The executor would wait for the rank that replies, and that one for this one.
        """
        if not self._place.replies:
            logger.error("Rank %d: a step failed, exiting", self.rank, exc_info=error)
            raise SystemExit(_STEP_FAILED) from error

    def get_supported_tasks(self) -> tuple[str, ...]:
        if self.model_config.runner_type == "generate":
            return ("generate",)
        return pooling_tasks(self.get_model())

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts of an engine with speculation; see ``worker.drafting``."""
        assert isinstance(self._runner, RblnModelRunner)
        return self._runner.take_draft_token_ids()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop a profile; raises ``ConfigError`` unless RBLN_PROFILER was set."""
        if self._profiler is None:
            raise ConfigError("profiling is off; start the server with RBLN_PROFILER=1")
        if is_start:
            self._profiler.start()
        else:
            self._profiler.stop()

    def sleep(self, *_: object, **__: object) -> None:
        """Raise ``UnsupportedModelError``: also for parts that are named (vLLM's ``discard``)."""
        raise SLEEP.refusal()

    discard = sleep

    def shutdown(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._build is not None:
            self._build.close()
        self._progress.close()
        self._board.close()

    def stage_lora(self, request: object) -> None:
        """Start reading an adapter in the background; returns at once."""
        self._loaded_adapters().stage(request)

    def staged_lora(self, lora_int_id: int) -> tuple[str, str]:
        """Return "reading", "ready" or "failed", and the reason.

        Raises ``AdapterError`` for an adapter that was not staged.
        """
        return self._loaded_adapters().staged(lora_int_id)

    def add_lora(self, lora_request: object) -> bool:
        """Load an adapter into a slot, from memory if staged; return False if it has a slot.

        Raises ``AdapterError`` for one that cannot be read or does not fit, and when ``max_loras``
        adapters are loaded.
        """
        self.synchronize_device()
        return self._loaded_adapters().add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Free the slot of an adapter that no running request uses; False for an unknown id."""
        self.synchronize_device()
        return self._loaded_adapters().remove(lora_id)

    def list_loras(self) -> set[int]:
        return set(self.lora_slots())

    def lora_slots(self) -> dict[int, int]:
        """Return the slot of each adapter by its id."""
        return self._loaded_adapters().slots()

    def lora_targets(self) -> dict[str, Target]:
        """Return the modules that an adapter can change, by name."""
        return self._loaded_adapters().layers.targets

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter that came with a request until ``remove_lora``."""
        return self._loaded_adapters().pin(lora_id)

    def _loaded_adapters(self) -> Adapters:
        if self._adapters is None:
            raise AdapterError("this engine takes no adapters; start it with --enable-lora")
        return self._adapters

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        """Return what other servers need to read blocks here, by pipeline and tensor rank."""
        if self._transfer is None:
            return None
        metadata = self._transfer.connector.get_handshake_metadata()
        ranks = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        return None if metadata is None else {ranks: metadata}

    def _make_compiler(self) -> Compiler:
        install_expert_layers()
        install_latent_layers(self.vllm_config)
        root = Path(self._rbln.cache_root) / "rbln"
        if not device_capabilities(self._rbln).runs_on_host:
            return self._make_rebel_compiler(root)
        if self._rbln.profiler:
            self._profiler = EmulatedProfiler(root / "profile", self.rank)
        if builds_kernels(self._rbln):
            self._progress.phase("init", "building the kernels for this CPU, once")
        on_file = partial(self._progress.step, "building the kernels: files")
        compiler, kernels = make_emulated_compiler(self._rbln, on_file)
        rank, ranks = self._place.local_number, self._place.local_ranks
        runtime = set_up_runtime(self._rbln, rank, ranks)
        self._description.has_kernels(compiler, kernels, runtime)
        logger.info(
            "Emulated RBLN device on the CPU: kernels %s (%s), %d threads%s",
            kernels.name,
            kernels.isa,
            runtime.threads,
            f"; {kernels.reason}" if kernels.reason else "",
        )
        install_layers()
        return compiler

    def _announce_rank(self) -> str:
        """Tell the SDK which rank this is; returns the backend of process groups."""
        if device_capabilities(self._rbln).runs_on_host:
            return "gloo"
        place, parallel = self._place, self.parallel_config
        has_collectives = uses_npu_collectives(self._rbln)
        devices = RankDevices(
            local_number=place.local_number,
            rank=place.number,
            ranks=place.ranks * parallel.data_parallel_size,
            npus_per_rank=self._rbln.num_devices_per_local_rank,
            assigned=parallel.assigned_physical_gpu_ids,
            local_rank=self.local_rank,
            finds_ports=has_collectives and self._rbln.auto_port is not False,
        )
        for warning in announce_rank(devices):
            logger.warning(warning)
        return "rbln-ccl" if has_collectives else "gloo"

    def _make_rebel_compiler(self, root: Path) -> Compiler:
        install_embedding()
        place = self._place
        budget = core_budget()
        threads = budget.threads(place.local_number, place.local_ranks)
        announce_threads(self._rbln.num_threads or threads)
        if self._rbln.profiler and (sdk := installed_sdk()) is not None:
            self._profiler = RebelProfiler(sdk)
        writes = not self._rbln.disable_compile_cache and not self._rbln.cache_read_only
        artifacts = root / "sdk" / f"rank{place.number}" if writes else None
        rebel = make_rebel_compiler(self._rbln, artifacts)
        self._description.has_device(rebel)
        return rebel


class EmulatedProfiler:
    """torch's profiler around the graphs; each stop writes one Chrome trace into ``directory``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._count = 0
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        if self._profile is None:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()

    def stop(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._count += 1
        profile.export_chrome_trace(
            str(self._directory / f"rank{self._rank}-{self._count}.trace.json")
        )


class RebelProfiler:
    """The SDK's profiler."""

    def __init__(self, sdk: ModuleType) -> None:
        sdk.flags.RBLN_PROFILER = True
        self._sdk = sdk

    def start(self) -> None:
        self._sdk.profiler.start()

    def stop(self) -> None:
        self._sdk.profiler.done()


def set_up_runtime(config: RblnConfig, local_rank: int, num_ranks: int) -> RuntimeInfo:
    """Set cores, threads and memory of one of the ranks of this host, and return them.

    Call it after the kernels are loaded, before there are threads or tensors of the model.
    """
    budget = core_budget()
    share = budget.share(local_rank, num_ranks)
    threads = config.num_threads or budget.threads(local_rank, num_ranks)
    set_threads(threads)
    memory = choose_memory(mapped=True, huge_pages=True)
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
