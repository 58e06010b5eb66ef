"""What vLLM's flags of compilation ask for, and what becomes of it.

vLLM compiles pieces of a model with Inductor and replays them as CUDA graphs; here the whole model
is captured as one graph for each bucket. So what asks for compilation is done anyway, sizes to
compile for become decode buckets, and what asks for anything else is refused by name.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rbln_backend.errors import ConfigError
from rbln_backend.refusals import model_config, refuse_model

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

logger = logging.getLogger(__name__)

_SIZES = "compile_sizes"
_GRAPH_SIZE = "max_cudagraph_capture_size"
_FLAG = "--compilation-config"
_NO_EAGER = "there is no eager path: every graph is compiled"


def settle_compilation(vllm_config: VllmConfig) -> None:
    """Turn what a user asked of vLLM's compilation into what is done here.

    Called before vLLM has filled in what nobody asked for. Raises `ConfigError` for what is not
    done.
    """
    model = model_config(vllm_config)
    if model is not None:
        # For some that cannot run vLLM has settled its compilation itself: theirs is the reason.
        refuse_model(model)
        if model.enforce_eager:
            raise ConfigError(f"--enforce-eager is not supported: {_NO_EAGER}")
    level = vllm_config.optimization_level
    if level == 0:
        raise ConfigError(f"--optimization-level 0 (-O0) is not supported: {_NO_EAGER}")
    if level == 1:
        logger.warning("-O1 has no effect: every graph is compiled as a whole, as for -O3")
    asked = _asked(vllm_config.compilation_config)
    _check_modes(asked)
    if (sizes := asked.pop(_SIZES, None)) is not None:
        vllm_config.compilation_config.compile_sizes = None
        _take_sizes(vllm_config, sizes)
    if (largest := asked.pop(_GRAPH_SIZE, None)) is not None:
        # Some of vLLM's models ask for it themselves.
        logger.warning(
            "%s: %s=%s has no effect: there are no CUDA graphs", _FLAG, _GRAPH_SIZE, largest
        )
    for name, value in asked.items():
        raise ConfigError(
            f"{_FLAG}: {name}={value!r} is not supported: the whole model is captured as one graph "
            "for each bucket, without Inductor or CUDA graphs"
        )


def _asked(given: CompilationConfig) -> dict[str, Any]:
    """What differs from an untouched configuration, by name."""
    untouched = type(given)()
    names = [field.name for field in fields(given) if field.init]
    pairs = {name: (getattr(given, name), getattr(untouched, name)) for name in names}
    return {name: value for name, (value, default) in pairs.items() if value != default}


def _check_modes(asked: dict[str, Any]) -> None:
    """Drop the modes that are what is done anyway; raise for others."""
    from vllm.config import CompilationMode, CUDAGraphMode

    mode = asked.pop("mode", CompilationMode.VLLM_COMPILE)
    if mode != CompilationMode.VLLM_COMPILE:
        given = f"{int(mode)} ({mode.name})"
        raise ConfigError(f"{_FLAG}: mode (level) must be 3, got {given}: {_NO_EAGER}")
    if asked.get("cudagraph_mode") == CUDAGraphMode.NONE:
        del asked["cudagraph_mode"]


def _take_sizes(vllm_config: VllmConfig, sizes: list[Any]) -> None:
    """Let sizes to compile for be decode buckets, besides the largest, which serves the rest."""
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{_FLAG}: compile_sizes must be integers above 0, got {sizes!r}")
    additional = vllm_config.additional_config
    ours = additional.get("rbln", {}) if isinstance(additional, dict) else None
    if not isinstance(additional, dict) or not isinstance(ours, dict):
        # Refused when it is read.
        return
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
    vllm_config.additional_config = additional | {
        "rbln": ours
        | {
            "decode_batch_bucket_strategy": "manual",
            "decode_batch_bucket_manual_buckets": buckets,
        }
    }
