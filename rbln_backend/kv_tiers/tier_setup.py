"""Builds the tiers of an engine from its configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rbln_backend.checkpoints.weights_digest import weights_digest
from rbln_backend.compiler.device import device_capabilities, installed_sdk
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.kernel_set import active_isa
from rbln_backend.kv_cache.adapter_digests import adapter_digests
from rbln_backend.kv_cache.manager import RblnKvCacheManager
from rbln_backend.kv_tiers.folder_tier import FolderTier
from rbln_backend.kv_tiers.memory_tier import MemoryTier
from rbln_backend.kv_tiers.page_keys import PageKeys
from rbln_backend.kv_tiers.page_layout import PageLayout
from rbln_backend.kv_tiers.page_store import PageStore
from rbln_backend.kv_tiers.tier_counts import TierCounts, TierMetrics
from rbln_backend.kv_tiers.tiering import KvTiering
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.vllm_compat.model_identity import model_fields
from rbln_backend.vllm_compat.surface import (
    KVCacheConfig,
    VllmConfig,
    configured,
    get_hash_fn_by_name,
    init_logger,
    resolve_none_hash_seed,
)

logger = init_logger(__name__)


def make_tiering(
    config: VllmConfig, kv_cache: KVCacheConfig, manager: RblnKvCacheManager, board: MetricsBoard
) -> KvTiering | None:
    """Return the tiers; None where none is configured or prefixes are not reused.

    Raises ``ConfigError`` for weights that cannot be identified, and for a folder that cannot be
    used.
    """
    rbln = configured(config)
    if not rbln.has_kv_tiers:
        return None
    if not config.cache_config.enable_prefix_caching:
        logger.warning("KV tiers have no effect: prefix caching is off")
        return None
    blocks = [paged.block_size for paged in manager.ours.paged]
    layout = PageLayout.of(kv_cache, manager.block_pool.hash_block_size, blocks)
    made_by = _made_by(config, rbln, kv_cache, layout)
    keys = PageKeys({**made_by, "unit": manager.block_pool.hash_block_size})
    counts = TierCounts()
    memory = folder = None
    if rbln.kv_tier_memory_bytes:
        memory = MemoryTier(rbln.kv_tier_memory_bytes)
    if rbln.kv_tier_folder is not None:
        root = Path(rbln.kv_tier_folder)
        folder = FolderTier(root, keys.folder_name, rbln.kv_tier_folder_bytes)
    logger.info(
        "KV tiers: pages of %d tokens, %d bytes; memory %d bytes; folder %s",
        *(layout.tokens, layout.num_bytes, rbln.kv_tier_memory_bytes, rbln.kv_tier_folder),
    )
    store = PageStore(memory, folder, counts)
    metrics, digests = TierMetrics(board, counts), adapter_digests(config.instance_id)
    return KvTiering(store, keys, layout, manager, metrics, digests)


def _made_by(
    config: VllmConfig, rbln: RblnConfig, kv_cache: KVCacheConfig, layout: PageLayout
) -> dict[str, Any]:
    """Return everything besides tokens that changes the bytes of a page."""
    model, cache = config.model_config, config.cache_config
    started = time.perf_counter()
    weights = weights_digest(model.model, str(config.load_config.load_format), model.seed)
    logger.info("KV tiers: weights identified in %.2f s", time.perf_counter() - started)
    algorithm = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    return {
        "weights": weights,
        "options": model.override_generation_config,
        "kernels": _kernels(rbln),
        **model_fields(config, rbln),
        "layers": [
            [group.layer_names, repr(group.kv_cache_spec)] for group in kv_cache.kv_cache_groups
        ],
        "page_tokens": layout.tokens,
        "hashes": [cache.prefix_caching_hash_algo, resolve_none_hash_seed(algorithm)],
    }


def _kernels(rbln: RblnConfig) -> str:
    """Return the instruction set of the kernels, or the NPU and the version of its compiler."""
    device = device_capabilities(rbln)
    if device.runs_on_host:
        return active_isa()
    return f"{device.product}, SDK {getattr(installed_sdk(), '__version__', 'unknown')}"
