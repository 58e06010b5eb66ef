"""Metrics of KV blocks and prefix hits."""

from __future__ import annotations

from rbln_backend.kv_cache.coordinator import RblnKvCoordinator
from rbln_backend.kv_cache.group_managers import WindowManager
from rbln_backend.reporting.metrics_board import MetricsBoard


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
