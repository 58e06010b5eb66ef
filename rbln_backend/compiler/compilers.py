"""The compilers of the devices; a process that only configures an engine does not import them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rbln_backend.compiler.device import (
    device_capabilities,
    find_npu,
    installed_sdk,
    wants_npu_tensors,
)
from rbln_backend.compiler.emulated_compiler import EmulatedCompiler
from rbln_backend.compiler.port import Compiler
from rbln_backend.compiler.rebel_compiler import RebelCompiler, has_npu_tensors
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


def make_rebel_compiler(config: RblnConfig, cache_dir: Path | None) -> Compiler:
    """The SDK's compiler for the configured NPU; ``cache_dir``: this rank's own."""
    sdk, npu = installed_sdk(), find_npu(config)
    assert sdk is not None
    assert npu is not None
    found = sdk.get_npu_name(0)
    if found and config.force_npu_name not in (None, found):
        name = config.force_npu_name
        logger.warning("RBLN_FORCE_NPU_NAME=%s is ignored: the host has %s", name, found)
    has_device = bool(found)
    return RebelCompiler(
        sdk,
        npu=npu,
        cache_dir=cache_dir,
        strict=config.strict_mode,
        num_devices=config.num_devices_per_local_rank,
        npu_tensors=has_device and uses_npu_tensors(config),
        has_device=has_device,
    )


def uses_npu_tensors(config: RblnConfig) -> bool:
    """Return True if weights, caches and buffers are torch tensors on the NPU.

    Raises ``ConfigError`` if the configuration requires that and torch-rbln is missing, and if
    torch-rbln is installed and does not load.
    """
    if wants_npu_tensors(config):
        if has_npu_tensors():
            return True
        raise ConfigError(
            "torch-rbln is installed, but does not load; repair it, or let the SDK keep the KV "
            "caches with use_device_tensor: false (VLLM_RBLN_USE_DEVICE_TENSOR=0)"
        )
    if config.use_device_tensor:
        raise ConfigError(
            "use_device_tensor (VLLM_RBLN_USE_DEVICE_TENSOR) needs torch-rbln, which is not "
            "installed; unset it to let the SDK keep the KV caches"
        )
    return False


def uses_npu_collectives(config: RblnConfig) -> bool:
    """Return True if ranks' process groups are the SDK's, as the vendor's are with device tensors.

    Raises ``ConfigError`` as ``uses_npu_tensors``.
    """
    sdk = installed_sdk()
    has_device = sdk is not None and bool(sdk.get_npu_name(0))
    return has_device and config.device != "emulated" and uses_npu_tensors(config)


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
