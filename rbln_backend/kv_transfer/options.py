"""vLLM's `--kv-transfer-config`: the options of NIXL, and offloading as settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.limits import KV_TRANSFER, NIXL
from rbln_backend.reports.info import KvTransferInfo

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

NIXL_CONNECTOR = "NixlConnector"
"""The name that users write, vLLM's."""
_CLASS = "RblnNixlConnector"
_MODULE = "rbln_backend.kv_transfer.nixl"
_NIXL_KEYS = ("backends", "kv_lease_duration", "num_threads", "engine_ttl")
_REQUIREMENTS = "requirements/nixl.txt"
_LEASE_S = 30
"""vLLM's default of ``kv_lease_duration``."""


def names_nixl(transfer: KVTransferConfig | None) -> bool:
    """Return whether the configuration names NIXL, as users write it or as settled here."""
    return transfer is not None and transfer.kv_connector in (NIXL_CONNECTOR, _CLASS)


def settle_nixl(transfer: KVTransferConfig) -> None:
    """Check the options of ``transfer`` and name our class in it, which extends vLLM's.

    Raises ``ConfigError`` for an unknown key or value, and where the package is missing.
    """
    if transfer.kv_connector_module_path:
        raise ConfigError(
            f"kv_connector_module_path={transfer.kv_connector_module_path!r}: "
            f"{NIXL_CONNECTOR} has no other module"
        )
    if transfer.kv_buffer_device != "cpu":
        raise ConfigError(
            f"kv_buffer_device={transfer.kv_buffer_device!r}: blocks are sent from host memory, "
            "'cpu'"
        )
    if transfer.enable_permute_local_kv:
        raise ConfigError("enable_permute_local_kv=True: blocks are sent as they lie in memory")
    unknown = sorted(transfer.kv_connector_extra_config.keys() - {*_NIXL_KEYS})
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: {unknown[0]!r} is none of {', '.join(_NIXL_KEYS)}"
        )
    lease = transfer.kv_connector_extra_config.get("kv_lease_duration", _LEASE_S)
    if not isinstance(lease, int) or isinstance(lease, bool) or lease < 6:
        raise ConfigError(f"kv_lease_duration={lease!r} must be a whole number of seconds, >= 6")
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            f"{NIXL_CONNECTOR} needs the package nixl: install {_REQUIREMENTS} into the environment"
        )
    transfer.kv_connector, transfer.kv_connector_module_path = _CLASS, _MODULE


def transfer_info(transfer: KVTransferConfig) -> KvTransferInfo:
    """Return the description of a settled ``transfer`` for `/v1/server_info`."""
    from vllm import envs

    extra = transfer.kv_connector_extra_config
    return KvTransferInfo(
        connector=NIXL_CONNECTOR,
        role=str(transfer.kv_role),
        host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        backends=list(extra.get("backends", ["UCX"])),
        lease_s=extra.get("kv_lease_duration", _LEASE_S),
        load_failure_policy=transfer.kv_load_failure_policy,
    )


def check_nixl(config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise ``UnsupportedModelError`` for an engine whose blocks cannot be sent."""
    from rbln_backend.devices.port import device_capabilities

    parallel = config.parallel_config
    # vLLM makes configurations without a model, too.
    model: ModelConfig | None = config.model_config
    pools = model is not None and model.runner_type == "pooling"
    stages, engines = parallel.pipeline_parallel_size, parallel.data_parallel_size
    NIXL.refuse(
        {
            f"--pipeline-parallel-size {stages}": stages > 1,
            "--distributed-executor-backend ray": parallel.distributed_executor_backend == "ray",
            f"--data-parallel-size {engines}": engines > 1,
            "device 'rebel' without torch-rbln": not device_capabilities(rbln).copies_caches,
            "--speculative-config": config.speculative_config is not None,
            "--enable-lora": config.lora_config is not None,
            "RBLN_USE_CUSTOM_KERNEL": rbln.use_custom_kernel,
            f"architecture {model and model.architecture!r}": pools,
        }
    )
    ranks = parallel.tensor_parallel_size
    # Latent attention caches one head, which each rank has whole.
    heads = ranks if model is None else 1 if model.use_mla else model.get_total_num_kv_heads()
    # Ranks that share a head: vLLM does not read them from fewer ranks.
    NIXL.refuse(
        {f"--tensor-parallel-size {ranks} above {heads} heads of keys and values": ranks > heads}
    )


def check_cached_layers(specs: Iterable[KVCacheSpec]) -> None:
    """Raise ``UnsupportedModelError`` for a layer whose KV is not in blocks of the context."""
    from rbln_backend.kv_cache.specs import PagedSpec

    if any(not isinstance(spec, PagedSpec) for spec in specs):
        raise NIXL.refusal("a sliding window")


_GIB = 1024**3
_OFFLOADING = "OffloadingConnector"
_SEVERAL = "MultiConnector"
_ALLOWED = f"{NIXL_CONNECTOR} and {_OFFLOADING}"
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_OFFLOADING_KEYS = ("spec_name", "cpu_bytes_to_use", "eviction_policy", "secondary_tiers")
# Threads of vLLM's tier: ours has one for each direction, which fills a disk of today.
_FOLDER_KEYS = ("type", "root_dir", "max_bytes", "n_read_threads", "n_write_threads")


def take_tiers(config: VllmConfig, rbln: RblnConfig) -> RblnConfig:
    """Return ``rbln`` with vLLM's options for offloading, which are taken out of ``config``.

    vLLM then makes no connector for them; it makes ours where NIXL is named, alone or with
    offloading in a ``MultiConnector``. Raises ``UnsupportedModelError`` for another connector,
    ``ConfigError`` for an unknown value.
    """
    transfer, cache = config.kv_transfer_config, config.cache_config
    nixl, offloading = (transfer, None) if names_nixl(transfer) else (None, transfer)
    if transfer is not None and transfer.kv_connector == _SEVERAL:
        shared = {"engine_id": transfer.engine_id, "kv_role": transfer.kv_role}
        shared["kv_load_failure_policy"] = transfer.kv_load_failure_policy
        entries = several_connectors(transfer)
        by_name = {e["kv_connector"]: type(transfer)(**{**shared, **e}) for e in entries}
        nixl, offloading = by_name[NIXL_CONNECTOR], by_name[_OFFLOADING]
    if nixl is not None:
        settle_nixl(nixl)
    fields: dict[str, Any] = {}
    if offloading is not None and offloading.kv_connector is not None:
        fields = _get_fields(offloading)
    if cache.kv_offloading_size is not None:
        if cache.kv_offloading_backend != "native":
            raise KV_TRANSFER.refusal(f"--kv-offloading-backend {cache.kv_offloading_backend}")
        if cache.kv_offloading_size <= 0:
            raise ConfigError(f"--kv-offloading-size {cache.kv_offloading_size} must be above 0")
        fields["kv_tier_memory_bytes"] = int(cache.kv_offloading_size * _GIB)
    config.kv_transfer_config, cache.kv_offloading_size = nixl, None
    return RblnConfig(**{**dict(rbln), **fields}) if fields else rbln


def several_connectors(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    """Return the connectors that ``transfer`` lists; none if it names one connector.

    Raises ``ConfigError`` for a list that this backend does not serve.
    """
    if transfer.kv_connector != _SEVERAL:
        return []
    _check_keys(transfer.kv_connector_extra_config, ("connectors",), "kv_connector_extra_config")
    entries = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(
            f"connectors={entries!r} of {_SEVERAL} must be a list of objects, {_ALLOWED}"
        )
    names = [e.get("kv_connector") for e in entries]
    if sorted(map(str, names)) != sorted((NIXL_CONNECTOR, _OFFLOADING)):
        raise ConfigError(f"connectors of {_SEVERAL}: {names!r}, must be {_ALLOWED}")
    return entries


def _get_fields(transfer: KVTransferConfig) -> dict[str, Any]:
    if transfer.kv_connector != _OFFLOADING or transfer.kv_connector_module_path:
        raise KV_TRANSFER.refusal(f"kv_connector={transfer.kv_connector!r}")
    if transfer.kv_role not in (None, "kv_both"):
        raise ConfigError(f"kv_role={transfer.kv_role!r}: {_OFFLOADING} needs 'kv_both'")
    extra = transfer.kv_connector_extra_config
    _check_keys(extra, _OFFLOADING_KEYS, "kv_connector_extra_config")
    if extra.get("spec_name", _SPECS[0]) not in _SPECS:
        raise ConfigError(f"spec_name={extra['spec_name']!r} is none of {', '.join(_SPECS)}")
    if extra.get("eviction_policy", "lru") != "lru":
        raise ConfigError(f"eviction_policy={extra['eviction_policy']!r}: only 'lru' is supported")
    fields: dict[str, Any] = {}
    if "cpu_bytes_to_use" in extra:
        fields["kv_tier_memory_bytes"] = _bytes(extra, "cpu_bytes_to_use", least=0)
    folders = extra.get("secondary_tiers", [])
    if not isinstance(folders, list) or len(folders) > 1:
        raise ConfigError(f"secondary_tiers={folders!r}: at most one tier, of type 'fs'")
    for folder in folders:
        if not isinstance(folder, dict) or folder.get("type") != "fs":
            raise ConfigError(f"secondary_tiers={[folder]!r}: the type of a tier must be 'fs'")
        _check_keys(folder, _FOLDER_KEYS, "a tier of type 'fs'")
        root = folder.get("root_dir")
        if not isinstance(root, str) or not root:
            raise ConfigError(f"root_dir={root!r} must be a path")
        fields["kv_tier_folder"] = root
        if "max_bytes" in folder:
            fields["kv_tier_folder_bytes"] = _bytes(folder, "max_bytes", least=1)
    if not any(fields.values()):
        raise ConfigError(
            f"{_OFFLOADING} needs 'cpu_bytes_to_use' above 0 or a tier of type 'fs' in "
            "'secondary_tiers', in kv_connector_extra_config"
        )
    return fields


def _check_keys(found: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    unknown = sorted(found.keys() - set(known))
    if unknown:
        raise ConfigError(f"{place}: {unknown[0]!r} is none of {', '.join(known)}")


def _bytes(found: Mapping[str, Any], name: str, least: int) -> int:
    value = found[name]
    is_whole = (
        isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    )
    if not is_whole or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of bytes, at least {least}")
    return int(value)
