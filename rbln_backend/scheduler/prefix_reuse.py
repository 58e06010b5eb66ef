"""The scheduler's side of prefix reuse: hashes, our coordinator, window moves, tiers, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rbln_backend.kv_cache.coordinator import RblnKvCacheManager, RblnKvCoordinator
from rbln_backend.kv_cache.managers import WindowManager
from rbln_backend.kv_cache.plan import reuse_unit_of
from rbln_backend.kv_cache.specs import (
    AppendedWindowSpec,
    WindowSpec,
    any_layer_spec,
    window_in,
)
from rbln_backend.kv_transfer.tiering import KvTiering, make_tiering
from rbln_backend.lora.adapter_files import AdapterHasher, adapter_digests
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.steps import with_transfers
from rbln_backend.vllm_compat.surface import (
    BlockHash,
    KVCacheConfig,
    KVEventBatch,
    Request,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
    configured,
    get_hash_fn_by_name,
    get_request_block_hasher,
    init_logger,
)


class KvMetrics:
    """Copies the coordinator's counts to the metrics board, once per step."""

    def __init__(self, board: MetricsBoard, coordinator: RblnKvCoordinator) -> None:
        self._coordinator = coordinator
        self._hits = {
            kind: board.counter("rbln_prefix_hit_tokens_total", kind=kind)
            for kind in ("block", "sub_block", "window")
        }
        self._windows = [_WindowGauges(board, window) for window in coordinator.windows]
        pool = coordinator.block_pool
        self._paged_used = None
        in_blocks = (*coordinator.paged, *coordinator.appended)
        if in_blocks:
            group = str(in_blocks[0].kv_cache_group_id)
            labels = {"group": group, "kind": "paged"}
            board.gauge("rbln_kv_blocks", **labels).set(pool.num_gpu_blocks - 1)
            self._paged_used = board.gauge("rbln_kv_blocks_used", **labels)
            self._paged_used.set(0.0)

    def update(self) -> None:
        pool = self._coordinator.block_pool
        if self._paged_used is not None:
            # Most steps take no block; with cold caches a store of Python's costs microseconds.
            used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            if used != self._paged_used.value:
                self._paged_used.set(used)
        for gauges in self._windows:
            gauges.update()
        for kind, tokens in self._coordinator.take_hit_tokens().items():
            self._hits[kind].inc(tokens)


class _WindowGauges:
    """Gauges of one window group: its blocks and its log."""

    def __init__(self, board: MetricsBoard, manager: WindowManager) -> None:
        labels = {"group": str(manager.kv_cache_group_id), "kind": "window"}
        board.gauge("rbln_kv_blocks", **labels).set(manager.num_blocks)
        board.gauge("rbln_window_log_pages", group=labels["group"]).set(manager.log.num_pages)
        self._used = board.gauge("rbln_kv_blocks_used", **labels)
        self._logged = board.gauge("rbln_window_log_pages_used", group=labels["group"])
        self._manager = manager

    def update(self) -> None:
        self._used.set(self._manager.num_blocks_in_use)
        self._logged.set(self._manager.log.num_used)


logger = init_logger(__name__)

Hasher = Callable[[Request], list[BlockHash]]
# Makes the hasher of one request.
Hashers = Callable[[Request], Hasher]


class PrefixReuse:
    """Extends the prefix cache of vLLM's scheduler: hashes, coordinator, window moves, metrics."""

    def __init__(
        self,
        manager: RblnKvCacheManager,
        hasher: Hashers | None,
        metrics: KvMetrics,
        tiers: KvTiering | None,
    ) -> None:
        self.manager = manager
        self.coordinator = manager.ours
        self.tiers = tiers
        self._hasher = hasher
        self._metrics = metrics

    @classmethod
    def install(
        cls, scheduler: Scheduler, vllm_config: VllmConfig, board: MetricsBoard
    ) -> PrefixReuse:
        """Replace the coordinator that upstream chose for ``scheduler``, which holds nothing yet.

        Upstream hashes and looks prefixes up in whole blocks, without a window log.
        """
        rbln, manager = configured(vllm_config), scheduler.kv_cache_manager
        caches = bool(vllm_config.cache_config.enable_prefix_caching)
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        unit = reuse_unit_of(specs, rbln.sub_block_size or scheduler.block_size)
        coordinator = RblnKvCoordinator(
            kv_cache_config=scheduler.kv_cache_config,
            max_model_len=scheduler.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=False,
            enable_caching=caches,
            enable_kv_cache_events=scheduler.enable_kv_cache_events,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=scheduler.block_size,
            hash_block_size=unit,
            metrics_collector=scheduler.kv_metrics_collector,
        )
        scheduler.kv_cache_manager = ours = RblnKvCacheManager(manager, coordinator)
        return cls(
            ours,
            hashers(
                vllm_config.cache_config.prefix_caching_hash_algo,
                unit,
                adapter_digests(vllm_config.instance_id),
            )
            if caches
            else None,
            KvMetrics(board, coordinator),
            make_tiering(vllm_config, scheduler.kv_cache_config, ours, board),
        )

    def hash(self, request: Request) -> None:
        """Hash a new request at our granularity."""
        if self._hasher is None:
            return
        request._block_hasher = self._hasher(request)
        request.block_hashes.clear()
        request.update_block_hashes()

    def begin(self, num_running: int) -> None:
        """Place prefixes that tiers have read; steps of ``num_running`` requests get blocks."""
        if self.tiers is not None:
            self.tiers.place_pages(self.coordinator.most_blocks(num_running, []))

    def finish(self, output: SchedulerOutput) -> SchedulerOutput:
        """Add the moves of a scheduled step to its output."""
        transfers = self.coordinator.take_transfers()
        if self.tiers is None:
            return with_transfers(output, transfers)
        return with_transfers(output, transfers, self.tiers.take_moves())

    def report(self) -> None:
        """Update the metrics and the tiers after a step."""
        self._metrics.update()
        if self.tiers is not None:
            self.tiers.end_step()

    def clear_tiers(self) -> bool:
        """Remove every page that the tiers hold of this model; False without tiers."""
        if self.tiers is not None:
            self.tiers.clear()
        return self.tiers is not None

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()


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

    def hasher_of(request: Request) -> Hasher:
        if request.lora_request is None:
            return plain
        number = request.lora_request.lora_int_id
        digest = digests.get(number) if digests else None
        name = number if digest is None else digest
        own: Hasher = get_request_block_hasher(unit, lambda value: algorithm((name, value)))
        return AdapterHasher(own, digest)

    return hasher_of


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
            *(chunk, smallest, smallest, logged[0].page_tokens),
        )
