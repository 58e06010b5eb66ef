"""The scheduler's side of prefix reuse: hashes, our coordinator, window moves, tiers, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rbln_backend.core import PageMoves
from rbln_backend.kv_cache.coordinator import RblnKvCacheManager, RblnKvCoordinator
from rbln_backend.kv_cache.plan import get_reuse_unit
from rbln_backend.kv_cache.specs import AppendedWindowSpec, WindowSpec, any_layer_spec, window_in
from rbln_backend.kv_transfer.tiering import make_tiering
from rbln_backend.lora.adapter_files import AdapterHasher, adapter_digests
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.steps import MovingSchedulerOutput
from rbln_backend.settings import configured

logger = init_logger(__name__)

Hasher = Callable[[Request], list[BlockHash]]
# Makes the hasher of one request.
Hashers = Callable[[Request], Hasher]


class KvMetrics:
    """Copies the coordinator's counts to the metrics board, once per step."""

    def __init__(self, board: MetricsBoard, coordinator: RblnKvCoordinator) -> None:
        self._coordinator = coordinator
        self._hits = {
            kind: board.counter("rbln_prefix_hit_tokens_total", kind=kind)
            for kind in ("block", "sub_block", "window")
        }
        pool = coordinator.block_pool
        self._paged_used = None
        in_blocks = (*coordinator.paged, *coordinator.appended)
        if in_blocks:
            labels = {"group": str(in_blocks[0].kv_cache_group_id), "kind": "paged"}
            board.gauge("rbln_kv_blocks", **labels).set(pool.num_gpu_blocks - 1)
            self._paged_used = board.gauge("rbln_kv_blocks_used", **labels)
            self._paged_used.set(0.0)
        self._windows = []
        """Manager, gauge of its blocks and gauge of its log, by window group."""
        for window in coordinator.windows:
            group = str(window.kv_cache_group_id)
            labels = {"group": group, "kind": "window"}
            board.gauge("rbln_kv_blocks", **labels).set(window.num_blocks)
            board.gauge("rbln_window_log_pages", group=group).set(window.log.num_pages)
            used = board.gauge("rbln_kv_blocks_used", **labels)
            logged = board.gauge("rbln_window_log_pages_used", group=group)
            self._windows.append((window, used, logged))

    def update(self) -> None:
        coordinator = self._coordinator
        if self._paged_used is not None:
            # Most steps take no block; with cold caches a store of Python's costs microseconds.
            pool = coordinator.block_pool
            used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            if used != self._paged_used.value:
                self._paged_used.set(used)
        for window, in_use, logged in self._windows:
            in_use.set(window.num_blocks_in_use)
            logged.set(window.log.num_used)
        if coordinator.hit_tokens:
            for kind, tokens in coordinator.hit_tokens.items():
                self._hits[kind].inc(tokens)
            coordinator.hit_tokens.clear()


class PrefixReuse:
    """Extends the prefix cache of vLLM's scheduler: hashes, coordinator, window moves, metrics."""

    def __init__(self, scheduler: Scheduler, vllm_config: VllmConfig, board: MetricsBoard) -> None:
        """Replace the coordinator that upstream chose for ``scheduler``, which holds nothing yet.

        Upstream hashes and looks prefixes up in whole blocks, without a window log.
        """
        rbln, cache = configured(vllm_config), vllm_config.cache_config
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        unit = get_reuse_unit(specs, rbln.sub_block_size or scheduler.block_size)
        self.coordinator = RblnKvCoordinator(
            kv_cache_config=scheduler.kv_cache_config,
            max_model_len=scheduler.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=False,
            enable_caching=bool(cache.enable_prefix_caching),
            enable_kv_cache_events=scheduler.enable_kv_cache_events,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=scheduler.block_size,
            hash_block_size=unit,
            metrics_collector=scheduler.kv_metrics_collector,
        )
        self.manager = RblnKvCacheManager(scheduler.kv_cache_manager, self.coordinator)
        scheduler.kv_cache_manager = self.manager
        self._hasher: Hashers | None = None
        if cache.enable_prefix_caching:
            digests = adapter_digests(vllm_config.instance_id)
            self._hasher = hashers(cache.prefix_caching_hash_algo, unit, digests)
        self.metrics = KvMetrics(board, self.coordinator)
        self.tiers = make_tiering(vllm_config, scheduler.kv_cache_config, self.manager, board)
        self.moves_kv = bool(self.coordinator.windows) or self.tiers is not None
        """Steps may move KV besides copying heads of blocks."""

    def hash(self, request: Request) -> None:
        """Hash a new request at our granularity."""
        if self._hasher is None:
            return
        request._block_hasher = self._hasher(request)
        request.block_hashes.clear()
        request.update_block_hashes()

    def with_moves(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the output of a scheduled step with its moves of KV, the same if it has none."""
        transfers = self.coordinator.take_transfers()
        pages = PageMoves() if self.tiers is None else self.tiers.take_moves()
        if not transfers and not pages:
            return output
        values = {item.name: getattr(output, item.name) for item in fields(output)}
        return MovingSchedulerOutput(**values, window_transfers=transfers, page_moves=pages)


def publish_events(scheduler: Scheduler) -> None:
    """Publish the queued KV events at once; upstream publishes after the next step."""
    if events := scheduler.kv_cache_manager.take_events():
        # The classes of events have no common base that batches accept.
        batch = KVEventBatch(ts=time.time(), events=events)  # type: ignore[arg-type]
        scheduler.kv_event_publisher.publish(batch)


def hashers(algorithm_name: str, unit: int, digests: Mapping[int, str] | None = None) -> Hashers:
    """Return hashers of prefixes in units of ``unit`` tokens, with a namespace per loaded adapter.

    Upstream's hashes contain only an adapter's name, which later can have other weights. Ours have
    its digest, if ``digests`` has it by number, or its number.
    """
    algorithm = get_hash_fn_by_name(algorithm_name)
    plain: Hasher = get_request_block_hasher(unit, algorithm)

    def get_hasher(request: Request) -> Hasher:
        if request.lora_request is None:
            return plain
        number = request.lora_request.lora_int_id
        digest = digests.get(number) if digests else None
        name = number if digest is None else digest
        own: Hasher = get_request_block_hasher(unit, lambda value: algorithm((name, value)))
        return AdapterHasher(own, digest)

    return get_hasher


def settle_prefix_caching(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Disable prefix caching where window layers have neither pages nor a log to resume from."""
    cache = vllm_config.cache_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    layers = [any_layer_spec(spec) for spec in specs]
    windows = [spec for spec in layers if window_in(spec) is not None]
    if not cache.enable_prefix_caching or not windows:
        return
    logged = [spec for spec in windows if isinstance(spec, WindowSpec) and spec.log_pages]
    in_pages = [spec for spec in windows if isinstance(spec, AppendedWindowSpec)]
    # A window is logged after the step that completes a page; with the next step in flight it has
    # moved on.
    moves_on = bool(logged) and bool(vllm_config.scheduler_config.async_scheduling)
    is_off = moves_on or not configured(vllm_config).window_prefix_cache
    if is_off or len(logged + in_pages) < len(windows):
        cache.enable_prefix_caching = False
        logger.warning(
            "Prefix caching is not available for %s. It has been automatically disabled.",
            "sliding window models",
        )
        return
    if not logged:
        return
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    smallest = min(spec.window for spec in logged)
    if smallest < chunk:
        logger.warning(
            "Prefixes can be resumed at the ends of prefill chunks (%d tokens) only, because a "
            "sliding window of %d tokens forgets the rest; --max-num-batched-tokens %d makes every "
            "multiple of %d tokens resumable.",
            chunk,
            smallest,
            smallest,
            logged[0].page_tokens,
        )
