"""The origin of KV blocks: two servers exchange blocks only if theirs is equal."""

from __future__ import annotations

import hashlib
import json

from rbln_backend.checkpoints.weights_digest import weights_digest
from rbln_backend.vllm_compat.model_identity import model_fields
from rbln_backend.vllm_compat.surface import KVCacheConfig, VllmConfig, configured

_SHORT = 12


def kv_origin(config: VllmConfig, kv_cache: KVCacheConfig) -> str:
    """Return a readable description, equal for servers whose blocks of a prompt are equal.

    Compiled sizes and the number of blocks may differ, and so may kernels of different
    instruction sets: their results differ by rounding alone. Raises ``ConfigError`` for weights
    that are not on this host.
    """
    rbln, model = configured(config), config.model_config
    fields = model_fields(config, rbln)
    del fields["rbln"]
    versions = {name: fields.pop(name) for name in ("torch", "vllm", "backend_sources")}
    layers = [
        [group.layer_names, type(group.kv_cache_spec).__name__]
        for group in kv_cache.kv_cache_groups
    ]
    options = [model.override_generation_config, rbln.enforce_model_fp32, layers]
    weights = weights_digest(model.model, str(config.load_config.load_format), model.seed)
    return (
        f"model {model.architecture} ({_digest([fields, options])}), "
        f"weights {weights[:_SHORT]}, dtype {fields['dtype']}, "
        f"KV dtype {fields['kv_dtype']}, context {model.max_model_len}, "
        f"blocks of {config.cache_config.block_size} tokens, vLLM {versions['vllm']}, "
        f"torch {versions['torch']}, backend {versions['backend_sources'][:_SHORT]}"
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT]
