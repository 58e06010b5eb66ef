"""The device that this process compiles for."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from types import ModuleType

from rbln_backend.compiler.capabilities import EMULATED, Capabilities, npu_capabilities
from rbln_backend.compiler.sdk.npu import Npu
from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError


@functools.cache
def device_capabilities(config: RblnConfig) -> Capabilities:
    """Return the capabilities of the device that this process compiles for.

    An NPU is used where ``device='rebel'`` or a name requires one, or the SDK finds one. The SDK is
    asked once: every layer of a model needs the answer. Raises ``ConfigError`` where a required NPU
    is missing, or an installed SDK does not load.
    """
    npu = find_npu(config)
    if npu is None:
        return EMULATED
    return npu_capabilities(npu, copies_caches=wants_npu_tensors(config))


def wants_npu_tensors(config: RblnConfig) -> bool:
    """Return whether torch-rbln is installed and not switched off; engines load it."""
    return config.use_device_tensor is not False and find_spec("torch_rbln") is not None


def find_npu(config: RblnConfig) -> Npu | None:
    """Return the NPU to compile for, or None for the emulated device."""
    if config.device == "emulated":
        return None
    sdk = installed_sdk()
    if sdk is None:
        _refuse_without_sdk(config)
        return None
    name = npu_name(sdk, config)
    if name is not None:
        return Npu.named(name)
    if config.device == "rebel":
        raise ConfigError(
            "device='rebel' found no NPU; set RBLN_FORCE_NPU_NAME to compile without one"
        )
    return None


def installed_sdk() -> ModuleType | None:
    """The module ``rebel``, or None where it is not installed.

    Raises ``ConfigError`` where it is installed and does not load, whatever it raised: running
    emulated on a host with an NPU is nothing that should happen unasked.
    """
    try:
        return importlib.import_module("rebel")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "rebel":
            return None
        raise ConfigError(
            "the RBLN SDK is installed, but 'import rebel' fails with "
            f"{type(error).__name__}: {error}; mend the installation or use device='emulated'"
        ) from error


def npu_name(sdk: ModuleType, config: RblnConfig) -> str | None:
    """The NPU's name, e.g. ``RBLN-CR13``: the one found, else the one forced, as in vllm-rbln."""
    name = sdk.get_npu_name(0) or config.force_npu_name
    return str(name) if name else None


def _refuse_without_sdk(config: RblnConfig) -> None:
    if config.device == "rebel":
        setting = "device='rebel'"
    elif config.force_npu_name:
        setting = f"force_npu_name={config.force_npu_name!r} (RBLN_FORCE_NPU_NAME)"
    else:
        return
    raise ConfigError(
        f"{setting} needs the RBLN SDK, but the module 'rebel' is not installed; "
        "install the 'npu' extra or use device='emulated'"
    )
