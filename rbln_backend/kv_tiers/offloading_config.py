"""vLLM's `--kv-transfer-config` for offloading, as settings of the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.kv_transfer.nixl_config import CONNECTOR as NIXL_CONNECTOR
from rbln_backend.kv_transfer.nixl_config import names_nixl, settle_nixl
from rbln_backend.unsupported import KV_TRANSFER

if TYPE_CHECKING:
    from vllm.config import CacheConfig, KVTransferConfig, VllmConfig

_GIB = 1024**3
CONNECTOR = "OffloadingConnector"
_SEVERAL = "MultiConnector"
_ALLOWED = f"{NIXL_CONNECTOR} and {CONNECTOR}"
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_KEYS = ("spec_name", "cpu_bytes_to_use", "eviction_policy", "secondary_tiers")
# Threads of vLLM's tier: ours has one for each direction, which fills a disk of today.
_FOLDER_KEYS = ("type", "root_dir", "max_bytes", "n_read_threads", "n_write_threads")


def take_tiers(config: VllmConfig, rbln: RblnConfig) -> RblnConfig:
    """Return ``rbln`` with vLLM's options for offloading, which are taken out of ``config``.

    vLLM then makes no connector for them; it makes ours where NIXL is named, alone or with
    offloading in a ``MultiConnector``. Raises ``UnsupportedModelError`` for another connector,
    ``ConfigError`` for an unknown value.
    """
    nixl, offloading = _sides(config.kv_transfer_config)
    if nixl is not None:
        settle_nixl(nixl)
    fields = _tier_fields(offloading, config.cache_config)
    config.kv_transfer_config = nixl
    config.cache_config.kv_offloading_size = None
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
    if sorted(map(str, names)) != sorted((NIXL_CONNECTOR, CONNECTOR)):
        raise ConfigError(f"connectors of {_SEVERAL}: {names!r}, must be {_ALLOWED}")
    return entries


def _sides(
    transfer: KVTransferConfig | None,
) -> tuple[KVTransferConfig | None, KVTransferConfig | None]:
    """Return the configurations of NIXL and of another connector, which offloads."""
    if transfer is None or transfer.kv_connector != _SEVERAL:
        return (transfer, None) if names_nixl(transfer) else (None, transfer)
    entries = several_connectors(transfer)
    shared = {"engine_id": transfer.engine_id, "kv_role": transfer.kv_role}
    policy = {"kv_load_failure_policy": transfer.kv_load_failure_policy}
    made = {e["kv_connector"]: type(transfer)(**{**shared, **policy, **e}) for e in entries}
    return made[NIXL_CONNECTOR], made[CONNECTOR]


def _tier_fields(transfer: KVTransferConfig | None, cache: CacheConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if transfer is not None and transfer.kv_connector is not None:
        fields = _fields_of(transfer)
    if cache.kv_offloading_size is not None:
        if cache.kv_offloading_backend != "native":
            raise KV_TRANSFER.refusal(f"--kv-offloading-backend {cache.kv_offloading_backend}")
        if cache.kv_offloading_size <= 0:
            raise ConfigError(f"--kv-offloading-size {cache.kv_offloading_size} must be above 0")
        fields["kv_tier_memory_bytes"] = int(cache.kv_offloading_size * _GIB)
    return fields


def _fields_of(transfer: KVTransferConfig) -> dict[str, Any]:
    if transfer.kv_connector != CONNECTOR or transfer.kv_connector_module_path:
        raise KV_TRANSFER.refusal(f"kv_connector={transfer.kv_connector!r}")
    if transfer.kv_role not in (None, "kv_both"):
        raise ConfigError(f"kv_role={transfer.kv_role!r}: {CONNECTOR} needs 'kv_both'")
    extra = transfer.kv_connector_extra_config
    _check_keys(extra, _KEYS, "kv_connector_extra_config")
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
        fields |= _folder_fields(folder)
    if not any(fields.values()):
        raise ConfigError(
            f"{CONNECTOR} needs 'cpu_bytes_to_use' above 0 or a tier of type 'fs' in "
            "'secondary_tiers', in kv_connector_extra_config"
        )
    return fields


def _folder_fields(folder: object) -> dict[str, Any]:
    if not isinstance(folder, dict) or folder.get("type") != "fs":
        raise ConfigError(f"secondary_tiers={[folder]!r}: the type of a tier must be 'fs'")
    _check_keys(folder, _FOLDER_KEYS, "a tier of type 'fs'")
    root = folder.get("root_dir")
    if not isinstance(root, str) or not root:
        raise ConfigError(f"root_dir={root!r} must be a path")
    fields: dict[str, Any] = {"kv_tier_folder": root}
    if "max_bytes" in folder:
        fields["kv_tier_folder_bytes"] = _bytes(folder, "max_bytes", least=1)
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
