"""Late grammar masks: a step that gives their requests no token, and a second one that does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rbln_backend.kv_cache.specs import WindowSpec
from rbln_backend.vllm_compat.surface import (
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    VllmConfig,
)


@dataclass
class MasksInTime(GrammarOutput):
    """Masks of a step; the requests of ``late`` have none yet and get no token in this step."""

    late: list[str] = field(default_factory=list)


def can_repeat_steps(config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether a request can compute its latest token again, with the same result.

    A window that is shifted in place would be shifted twice. With steps in flight, the next one
    is scheduled before the token is missed; with drafts, a step has several tokens of a request.
    """
    return not (
        config.parallel_config.pipeline_parallel_size > 1
        or config.scheduler_config.async_scheduling
        or config.speculative_config is not None
        or config.kv_transfer_config is not None
        or any(isinstance(spec, WindowSpec) for spec in _layer_specs(kv_cache_config))
    )


def _layer_specs(config: KVCacheConfig) -> Iterable[KVCacheSpec]:
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            yield from spec.kv_cache_specs.values()
        else:
            yield spec
