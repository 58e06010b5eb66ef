"""vLLM's `--kv-transfer-config` for offloading, as settings of KV tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rbln_backend.errors import ConfigError
from rbln_backend.unsupported import KV_TRANSFER

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR = "OffloadingConnector"
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_KEYS = ("spec_name", "cpu_bytes_to_use", "eviction_policy", "secondary_tiers")
# Threads of vLLM's tier: ours has one for each direction, which fills a disk of today.
_FOLDER_KEYS = ("type", "root_dir", "max_bytes", "n_read_threads", "n_write_threads")


def tier_fields(transfer: KVTransferConfig) -> dict[str, Any]:
    """Return the fields of `RblnConfig` that a transfer configuration sets.

    Raises `UnsupportedModelError` for another connector, `ConfigError` for an unknown value.
    """
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
