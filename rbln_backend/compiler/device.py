"""Which device this process compiles for, and the compiler of it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from rbln_backend.compiler.capabilities import EMULATED, Capabilities, npu_capabilities
from rbln_backend.compiler.emulated_compiler import EmulatedCompiler
from rbln_backend.compiler.port import Compiler
from rbln_backend.compiler.rebel_compiler import RebelCompiler, has_npu_tensors
from rbln_backend.compiler.sdk.npu import Npu
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.build import BuildReport, can_build, no_op
from rbln_backend.emulator.kernel_set import (
    KernelSet,
    find_built,
    kernel_stores,
    load_kernels,
    start_recording,
)
from rbln_backend.errors import ConfigError

logger = logging.getLogger(__name__)


def device_capabilities(config: RblnConfig) -> Capabilities:
    """Return the capabilities of the device that this process compiles for.

    An NPU is used where ``device='rebel'`` or a name requires one, or the SDK finds one. Raises
    ``ConfigError`` where a required NPU is missing, or an installed SDK does not load.
    """
    npu = _find_npu(config)
    return EMULATED if npu is None else npu_capabilities(npu)


def _find_npu(config: RblnConfig) -> Npu | None:
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


def make_rebel_compiler(config: RblnConfig, cache_dir: Path | None) -> Compiler:
    """The SDK's compiler for the configured NPU; ``cache_dir``: this rank's own."""
    sdk, npu = installed_sdk(), _find_npu(config)
    assert sdk is not None
    assert npu is not None
    found = sdk.get_npu_name(0)
    if found and config.force_npu_name not in (None, found):
        name = config.force_npu_name
        logger.warning("RBLN_FORCE_NPU_NAME=%s is ignored: the host has %s", name, found)
    return RebelCompiler(
        sdk,
        npu=npu,
        cache_dir=cache_dir,
        strict=config.strict_mode,
        num_devices=config.num_devices_per_local_rank,
        npu_tensors=bool(found) and uses_npu_tensors(config),
        has_device=bool(found),
    )


def uses_npu_tensors(config: RblnConfig) -> bool:
    """Return True if weights, caches and buffers are torch tensors on the NPU.

    Raises ``ConfigError`` if the configuration requires that and torch-rbln is missing.
    """
    if config.use_device_tensor is False:
        return False
    if has_npu_tensors():
        return True
    if config.use_device_tensor:
        raise ConfigError(
            "use_device_tensor (VLLM_RBLN_USE_DEVICE_TENSOR) needs torch-rbln, which is not "
            "installed or does not load; unset it to let the SDK keep the KV caches"
        )
    return False


def builds_kernels(config: RblnConfig) -> bool:
    """Return True if an emulated compiler has to build its kernels first."""
    stores = kernel_stores(config.cache_root, config.cache_bundles)
    return config.kernels != "aten" and can_build() and find_built(stores) is None


def make_emulated_compiler(
    config: RblnConfig, report: BuildReport = no_op
) -> tuple[Compiler, KernelSet]:
    """The emulated compiler over the kernels that could be built or loaded here.

    ``report`` gets the progress of a build.
    """
    kernels = load_kernels(
        Path(config.cache_root),
        config.kernels,
        bundles=[Path(x) for x in config.cache_bundles],
        report=report,
    )
    # A profile shows operators, which recorded calls are not.
    record = None if kernels.name == "aten" or config.profiler else start_recording
    compiler = EmulatedCompiler(
        kernels.name,
        hardware=kernels.isa,
        record=record,
        reserves_kv=config.kv_cache_pages == "reserved",
    )
    return compiler, kernels


def expected_fingerprint(config: RblnConfig) -> Mapping[str, str | int | bool | None]:
    """The fingerprint of the compiler that an engine would make, found without loading kernels."""
    if not device_capabilities(config).runs_on_host:
        return make_rebel_compiler(config, None).fingerprint()
    stores = kernel_stores(config.cache_root, config.cache_bundles)
    native = config.kernels != "aten" and (find_built(stores) is not None or can_build())
    return EmulatedCompiler("native" if native else "aten").fingerprint()
