"""Conversion of vLLM's compilation flags.

vLLM compiles pieces of a model with Inductor and replays them as CUDA graphs. Here the whole model
is captured as one graph per bucket: flags that request compilation have no further effect, sizes
to compile become decode buckets, and all other flags are rejected by name.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rbln_backend.errors import ConfigError
from rbln_backend.refusals import model_config, refuse_model
from rbln_backend.settings import given_options, options_of_vllm

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

logger = logging.getLogger(__name__)

_SIZES = "compile_sizes"
_GRAPH_SIZE = "max_cudagraph_capture_size"
_FLAG = "--compilation-config"
_NO_EAGER = "there is no eager path: every graph is compiled"


def settle_compilation(vllm_config: VllmConfig) -> None:
    """Convert the user's compilation settings; raises `ConfigError` for unsupported ones.

    Must run before vLLM fills in its own defaults.
    """
    model = model_config(vllm_config)
    if model is not None:
        # First: for some unsupported models vLLM changes the compilation settings itself.
        refuse_model(model)
        if model.enforce_eager:
            raise ConfigError(f"--enforce-eager is not supported: {_NO_EAGER}")
    level = vllm_config.optimization_level
    if level == 0:
        raise ConfigError(f"--optimization-level 0 (-O0) is not supported: {_NO_EAGER}")
    if level == 1:
        logger.warning("-O1 has no effect: every graph is compiled as a whole, as for -O3")
    given = _changed(vllm_config.compilation_config)
    _check_modes(given)
    if (sizes := given.pop(_SIZES, None)) is not None:
        vllm_config.compilation_config.compile_sizes = None
        _take_sizes(vllm_config, sizes)
    if (largest := given.pop(_GRAPH_SIZE, None)) is not None:
        # Some of vLLM's models set it themselves.
        logger.warning(
            "%s: %s=%s has no effect: there are no CUDA graphs", _FLAG, _GRAPH_SIZE, largest
        )
    for name, value in given.items():
        raise ConfigError(
            f"{_FLAG}: {name}={value!r} is not supported: the whole model is captured as one graph "
            "for each bucket, without Inductor or CUDA graphs"
        )


def _changed(given: CompilationConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by name."""
    untouched = type(given)()
    names = [field.name for field in fields(given) if field.init]
    pairs = {name: (getattr(given, name), getattr(untouched, name)) for name in names}
    return {name: value for name, (value, default) in pairs.items() if value != default}


def _check_modes(given: dict[str, Any]) -> None:
    """Remove the modes that describe this backend; raise for others."""
    from vllm.config import CompilationMode, CUDAGraphMode

    mode = given.pop("mode", CompilationMode.VLLM_COMPILE)
    if mode != CompilationMode.VLLM_COMPILE:
        name = f"{int(mode)} ({mode.name})"
        raise ConfigError(f"{_FLAG}: mode must be 3, got {name}: {_NO_EAGER}")
    if given.get("cudagraph_mode") == CUDAGraphMode.NONE:
        del given["cudagraph_mode"]


def _take_sizes(vllm_config: VllmConfig, sizes: list[Any]) -> None:
    """Make sizes to compile the decode buckets, together with the largest batch."""
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{_FLAG}: compile_sizes must be integers above 0, got {sizes!r}")
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        # Rejected when it is read.
        return
    ours = given_options(additional)
    if taken := [name for name in ours if name.startswith("decode_batch_bucket_")]:
        raise ConfigError(
            f"{_FLAG}: compile_sizes and {taken[0]} of --additional-config both set the decode "
            "buckets; give one of them"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    largest = vllm_config.scheduler_config.max_num_seqs // stages
    buckets = sorted({size for size in sizes if size < largest} | {largest})
    logger.warning("compile_sizes %s become the decode buckets %s", sizes, buckets)
    if above := [size for size in sizes if size > largest]:
        logger.warning("compile_sizes %s are left out: no decode step exceeds %d", above, largest)
    vllm_config.additional_config = options_of_vllm(additional) | {
        "rbln": ours
        | {
            "decode_batch_bucket_strategy": "manual",
            "decode_batch_bucket_manual_buckets": buckets,
        }
    }
