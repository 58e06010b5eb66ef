"""vLLM's `--kv-transfer-config` for NIXL: what is accepted, and the connector that serves it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.reporting.reports import KvTransferInfo
from rbln_backend.unsupported import NIXL

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

CONNECTOR = "NixlConnector"
"""The name that users write, vLLM's."""
_CLASS = "RblnNixlConnector"
_MODULE = "rbln_backend.kv_transfer.nixl_connector"
_KEYS = ("backends", "kv_lease_duration", "num_threads", "engine_ttl")
_REQUIREMENTS = "requirements/nixl.txt"
_LEASE_S = 30
"""vLLM's default of ``kv_lease_duration``."""


def names_nixl(transfer: KVTransferConfig | None) -> bool:
    """Return whether the configuration names NIXL, as users write it or as settled here."""
    return transfer is not None and transfer.kv_connector in (CONNECTOR, _CLASS)


def settle_nixl(transfer: KVTransferConfig) -> None:
    """Check the options of ``transfer`` and name our class in it, which extends vLLM's.

    Raises ``ConfigError`` for an unknown key or value, and where the package is missing.
    """
    if transfer.kv_connector_module_path:
        raise ConfigError(
            f"kv_connector_module_path={transfer.kv_connector_module_path!r}: "
            f"{CONNECTOR} has no other module"
        )
    if transfer.kv_buffer_device != "cpu":
        raise ConfigError(
            f"kv_buffer_device={transfer.kv_buffer_device!r}: blocks are sent from host memory, "
            "'cpu'"
        )
    if transfer.enable_permute_local_kv:
        raise ConfigError("enable_permute_local_kv=True: blocks are sent as they lie in memory")
    unknown = sorted(transfer.kv_connector_extra_config.keys() - {*_KEYS})
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: {unknown[0]!r} is none of {', '.join(_KEYS)}"
        )
    lease = transfer.kv_connector_extra_config.get("kv_lease_duration", _LEASE_S)
    if not isinstance(lease, int) or isinstance(lease, bool) or lease < 6:
        raise ConfigError(f"kv_lease_duration={lease!r} must be a whole number of seconds, >= 6")
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            f"{CONNECTOR} needs the package nixl: install {_REQUIREMENTS} into the environment"
        )
    transfer.kv_connector, transfer.kv_connector_module_path = _CLASS, _MODULE


def transfer_info(transfer: KVTransferConfig) -> KvTransferInfo:
    """Return the description of a settled ``transfer`` for `/v1/server_info`."""
    from vllm import envs

    extra = transfer.kv_connector_extra_config
    return KvTransferInfo(
        connector=CONNECTOR,
        role=str(transfer.kv_role),
        host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        backends=list(extra.get("backends", ["UCX"])),
        lease_s=extra.get("kv_lease_duration", _LEASE_S),
        load_failure_policy=transfer.kv_load_failure_policy,
    )


def check_nixl(config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise ``UnsupportedModelError`` for an engine whose blocks cannot be sent."""
    from rbln_backend.compiler.device import device_capabilities

    parallel = config.parallel_config
    # vLLM makes configurations without a model, too.
    model: ModelConfig | None = config.model_config
    if parallel.pipeline_parallel_size > 1:
        raise NIXL.refusal(f"--pipeline-parallel-size {parallel.pipeline_parallel_size}")
    if parallel.distributed_executor_backend == "ray":
        raise NIXL.refusal("--distributed-executor-backend ray")
    if parallel.data_parallel_size > 1:
        raise NIXL.refusal(f"--data-parallel-size {parallel.data_parallel_size}")
    if not device_capabilities(rbln).copies_caches:
        raise NIXL.refusal("device 'rebel' without torch-rbln")
    if config.speculative_config is not None:
        raise NIXL.refusal("--speculative-config")
    if config.lora_config is not None:
        raise NIXL.refusal("--enable-lora")
    if rbln.use_custom_kernel:
        raise NIXL.refusal("RBLN_USE_CUSTOM_KERNEL")
    if model is not None and model.runner_type == "pooling":
        raise NIXL.refusal(f"architecture {model.architecture!r}")
    ranks = parallel.tensor_parallel_size
    # Latent attention caches one head, which each rank has whole.
    heads = ranks if model is None else 1 if model.use_mla else model.get_total_num_kv_heads()
    if ranks > heads:
        # Ranks that share a head: vLLM does not read them from fewer ranks.
        raise NIXL.refusal(f"--tensor-parallel-size {ranks} above {heads} heads of keys and values")


def check_cached_layers(specs: Iterable[KVCacheSpec]) -> None:
    """Raise ``UnsupportedModelError`` for a layer whose KV is not in blocks of the context."""
    from rbln_backend.kv_cache.specs import PagedSpec

    if any(not isinstance(spec, PagedSpec) for spec in specs):
        raise NIXL.refusal("a sliding window")
