"""Which device this process compiles for, and the compiler of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rbln_backend.compiler.emulated_compiler import EmulatedCompiler
from rbln_backend.compiler.port import Compiler
from rbln_backend.compiler.rebel_compiler import RebelCompiler, find_sdk, npu_name
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.build import can_build
from rbln_backend.emulator.kernel_set import (
    KernelSet,
    find_built,
    kernel_stores,
    load_kernels,
    start_recording,
)
from rbln_backend.errors import ConfigError

Device = Literal["emulated", "rebel"]


def choose_device(config: RblnConfig) -> Device:
    """``rebel`` when asked for, or when the SDK sees an NPU (or is told to pretend one).

    Raises ``ConfigError`` when ``rebel`` is asked for and cannot be had.
    """
    if config.device == "emulated":
        return "emulated"
    sdk = find_sdk()
    found = npu_name(sdk, config.force_npu_name) if sdk is not None else None
    if config.device == "rebel":
        if sdk is None:
            raise ConfigError(
                "device='rebel' needs the RBLN SDK, but the module 'rebel' is not installed; "
                "install the 'npu' extra or use device='emulated'"
            )
        if found is None:
            raise ConfigError(
                "device='rebel' found no NPU; set RBLN_FORCE_NPU_NAME to compile without one"
            )
    return "rebel" if found is not None else "emulated"


def make_rebel_compiler(config: RblnConfig, cache_dir: Path | None) -> Compiler:
    """The SDK's compiler for the NPU found by ``choose_device``."""
    sdk = find_sdk()
    assert sdk is not None
    device = npu_name(sdk, config.force_npu_name)
    assert device is not None
    return RebelCompiler(
        sdk,
        device=device,
        cache_dir=cache_dir,
        strict=config.strict_mode,
        num_devices=config.num_devices_per_local_rank,
    )


def make_emulated_compiler(config: RblnConfig) -> tuple[Compiler, KernelSet]:
    """The emulated compiler over the kernels that could be built or loaded here."""
    kernels = load_kernels(
        Path(config.cache_root), config.kernels, bundles=[Path(x) for x in config.cache_bundles]
    )
    # A profile shows operators, which recorded calls are not.
    record = None if kernels.name == "aten" or config.profiler else start_recording
    compiler = EmulatedCompiler(kernels.name, hardware=kernels.isa, record=record)
    return compiler, kernels


def expected_fingerprint(config: RblnConfig) -> Mapping[str, str | int | bool | None]:
    """The fingerprint of the compiler that an engine would make, found without loading kernels."""
    if choose_device(config) == "rebel":
        return make_rebel_compiler(config, None).fingerprint()
    stores = kernel_stores(config.cache_root, config.cache_bundles)
    native = config.kernels != "aten" and (find_built(stores) is not None or can_build())
    return EmulatedCompiler("native" if native else "aten").fingerprint()
