"""The patch ledger: every upstream name that the backend replaces at run time, and why.

The first column has the name's module, or the vLLM class through which our code reaches it; a test
compares it with all assignments in our sources. Settings, messages from scheduler to workers and
the runner's tables are meant to be written, and not listed. Each function checks at the start that
what it replaces has the shape that it was written for, that of vLLM 0.30.

| target | where | symptom without it | why it is safe | delete when |
|---|---|---|---|---|
| `torch.accelerator.empty_cache`, `torch.accelerator.empty_host_cache` | `apply_patches`, engine and worker processes | vLLM 0.30's ``cleanup_dist_env_and_memory`` calls them for every platform but its own CPU one; torch raises without an accelerator, so each clean shutdown logs a traceback | without an accelerator there is no cache to empty | vLLM asks the platform, or torch makes them no-ops |
| `vllm.v1.request.Request.status`, `vllm.v1.request.Request.stop_reason` | `rbln_backend/scheduler/scheduler.py`, engine process | a request for which every token is forbidden gets token 0 | as vLLM's scheduler ends a request whose token a grammar refuses, in the same place | vLLM ends such requests |
| `vllm.v1.structured_output.StructuredOutputManager.backend` is set before the engine's first request | `rbln_backend/grammar/backend.py`, engine process | the first request chooses the backend and waits for it to be made, in the thread that takes requests in; a compile starts eight threads; whitespace has no bound | it is a subclass of the backend that the manager would make | the backend is a setting of the engine |
| `vllm.v1.structured_output.StructuredOutputManager.reasoner_cls` | `rbln_backend/grammar/backend.py`, engine process | a marker anywhere in the prompt decides whether a constraint binds, and a parser without tokens for its markers lets none bind | a class over vLLM's parser of that name, with its markers (`tests/server/vllm/test_reasoning.py`) | vLLM reads whole answers, streams and prompts alike |
| `vllm.v1.core.sched.scheduler.Scheduler.kv_cache_manager` | `rbln_backend/scheduler/prefix_reuse.py`, engine process | prefixes are looked up in whole blocks, and windows not at all | it is a subclass over a subclass of vLLM's coordinator, put in before the first request; it takes over what vLLM's had, attribute by attribute | vLLM lets a platform choose the coordinator |
| `vllm.v1.core.sched.scheduler.Scheduler.scheduler_config.enable_chunked_prefill` | `rbln_backend/scheduler/prompts.py`, engine process | of prompts that share a prefill step the last is cut, and takes part in it without a token to sample | it is off for the one call that takes those prompts, each of which fits, and on again whatever becomes of it; nothing else reads it meanwhile | vLLM lets a scheduler say which prompts may be cut |
| `vllm.v1.core.sched.scheduler.Scheduler.current_step` | `rbln_backend/scheduler/plain_decode.py`, engine process | a request of which vLLM spaces the steps waits for a number that plain steps do not reach | a plain step counts itself as vLLM's own `schedule` does | vLLM counts its steps elsewhere |
| `vllm.v1.request.Request._block_hasher` | `rbln_backend/scheduler/prefix_reuse.py`, engine process | hashes are of whole blocks, and know an adapter by its name alone | vLLM's own hasher with another unit; all hashes are made anew at once | the engine's hash unit is a setting, and hashes know the load of an adapter |
| `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.lora_a_stacked`, `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.lora_b_stacked`, `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.output_slices`, `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA._apply_lora_to_output` | `rbln_backend/lora/layers.py`, worker processes | adapters lie in vLLM's layout and are packed anew for each step; hidden states lose the axes that an NPU wants | only the object's method reads the slots, which is ours and adds the same product | vLLM asks the platform for a layer's slots |
| `vllm.model_executor.models.interfaces.EagleModelMixin._maybe_add_hidden_state` | `rbln_backend/worker/draft_model.py`, worker processes with pipeline stages and EAGLE-3 | classes of MiniMax-M2, Qwen3-MoE and gpt-oss drop the hidden states that a draft model reads, except in the last stage; MiniMax-M2's numbers the layers of each stage from 0 | only the object's method is replaced, which vLLM calls with each state; ours adds the same sum to the stage's outputs | the class has `supports_aux_hidden_states_over_pp` (vllm-project/vllm#50514) |
| `vllm.model_executor.models.registry._run_in_subprocess` | ``inspect_models_here``, every process that reads flags | what a model class can do is looked up in a new Python, which imports vLLM again: six seconds for every model that a cache root has not seen | it is there to keep CUDA uninitialised, and there is none; the engine's process imports the class anyway | the platform may say where it happens |
| the check `has_arctic_inference` in the module of `SpeculativeConfig` | ``speculate_here``, every process that reads flags | ``--speculative-config '{"method": "suffix"}'`` is refused without the package arctic-inference | only the check is passed: drafts of that name are our own (`rbln_backend/speculation/text_drafts.py`), and nothing imports the package | vLLM leaves the check to who makes the drafts |
| `__post_init__` of vLLM's `VllmConfig` | ``schedule_in_order``, every process that reads flags | vLLM sets ``async_scheduling`` before it calls the platform, which then cannot see if the flag was given: a default of our own is not possible, nor a refusal of the flag alone | vLLM's own method runs, with False in place of None | vLLM asks the platform for the default |
| `use_v2_model_runner` of vLLM's `VllmConfig` | ``run_here``, every process | with ``VLLM_USE_V2_MODEL_RUNNER=1``, or where Triton finds a driver, vLLM's scheduler writes steps for a runner that is not ours | the property is False, which is what vLLM computes on hosts without Triton; a request by the variable is logged | the platform may say which runner it has |
| `get_batch_defaults` of vLLM's `EngineArgs` | ``chunk_by_default``, every process that reads flags, with SDK 0.12.1 or later | a step has 2,048 tokens or more unless ``max_num_batched_tokens`` is given, more than that SDK takes | vLLM's own method returns such a table; numbers that are given win | vLLM asks the platform for the default |
| `vllm.sampling_params.SamplingParams._validate_spec_decode` | ``speculate_here``, every process that reads flags | requests with ``min_p`` or ``logit_bias`` are refused by an engine that speculates | drafts are sampled place by place by the ordinary sampler (`rbln_backend/worker/verification.py`), which knows both | vLLM's rejection sampler supports them, or calls the platform |
| `vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp.MiniMaxText01RMSNormTP.forward_qkv` | `rbln_backend/models/token_axes.py`, worker processes on an NPU | MiniMax-M2's norm of queries and keys takes rows alone, and calls a kernel of GPUs on several ranks | the same norm in float32, with one sum over the ranks (`tests/npu/test_engines.py`) | the norm takes any axes |
| function `vllm` in ``ALL_ATTENTION_FUNCTIONS`` of transformers | `rbln_backend/models/token_axes.py`, worker processes on an NPU | vLLM's function makes one row of all requests | it calls the same layer with a row for each request | vLLM's Transformers backend takes a batch |
"""  # noqa: E501

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from rbln_backend.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_T = TypeVar("_T")


def _require(fits: bool, name: str) -> None:
    """Raise ``ConfigError`` unless a name of vLLM is what its replacement was written for."""
    from rbln_backend.host.resources import SUPPORTED, vllm_build

    if not fits:
        raise ConfigError(
            f"vLLM {vllm_build().version} has another {name} than the one that this backend "
            f"replaces; install vLLM {SUPPORTED}"
        )


def _takes(function: Any, *parameters: str) -> bool:
    return callable(function) and tuple(inspect.signature(function).parameters) == parameters


@cache
def inspect_models_here() -> None:
    """Make vLLM inspect model classes in this process."""
    from vllm.model_executor.models import registry

    _require(_takes(registry._run_in_subprocess, "fn"), "registry._run_in_subprocess")

    def call(fn: Callable[[], _T]) -> _T:
        return fn()

    registry._run_in_subprocess = call


@cache
def speculate_here() -> None:
    """Make vLLM accept draft methods and sampling parameters that we support."""
    from vllm.config import speculative
    from vllm.sampling_params import SamplingParams

    check: Any = SamplingParams._validate_spec_decode
    _require(_takes(check, "self", "speculative_config"), "SamplingParams._validate_spec_decode")
    check = getattr(speculative, "has_arctic_inference", None)
    _require(_takes(check), "speculative.has_arctic_inference")
    SamplingParams._validate_spec_decode = lambda *_: None  # type: ignore[method-assign]
    speculative.has_arctic_inference = lambda: True  # type: ignore[attr-defined]


@cache
def schedule_in_order() -> None:
    """Make vLLM leave asynchronous scheduling off unless the flag is given."""
    from vllm.config import VllmConfig

    upstream: Any = VllmConfig.__post_init__
    _require(_takes(upstream, "self"), "VllmConfig.__post_init__")

    def in_order(config: VllmConfig) -> None:
        if config.scheduler_config.async_scheduling is None:
            config.scheduler_config.async_scheduling = False
        upstream(config)

    VllmConfig.__post_init__ = in_order  # type: ignore[method-assign]


@cache
def run_here() -> None:
    """Make vLLM's choice of its V2 model runner have no effect."""
    from vllm import envs
    from vllm.config import VllmConfig
    from vllm.logger import init_logger

    def no_v2_runner(config: VllmConfig) -> bool:
        if config.watermark_config is not None:
            raise ConfigError(
                "--watermark-config: watermarks are drawn by vLLM's V2 model runner alone"
            )
        if envs.VLLM_USE_V2_MODEL_RUNNER:
            init_logger(__name__).warning_once(
                "VLLM_USE_V2_MODEL_RUNNER=1 is ignored: this backend has one model runner of its "
                "own"
            )
        return False

    upstream: Any = VllmConfig.use_v2_model_runner
    _require(isinstance(upstream, property), "VllmConfig.use_v2_model_runner")
    VllmConfig.use_v2_model_runner = property(no_v2_runner)  # type: ignore[method-assign, assignment]


def chunk_by_default(tokens: int) -> None:
    """Make vLLM take steps of ``tokens`` unless a number is given."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    upstream: Any = EngineArgs.get_batch_defaults
    if upstream.__module__ == __name__:
        return
    _require(_takes(upstream, "world_size"), "EngineArgs.get_batch_defaults")

    def defaults(world_size: int) -> Any:
        return dict.fromkeys((None, *UsageContext), tokens), upstream(world_size)[1]

    EngineArgs.get_batch_defaults = staticmethod(defaults)  # type: ignore[method-assign]


@cache
def apply_patches() -> None:
    """Apply what processes of an engine need."""
    import torch

    run_here()
    if torch.accelerator.is_available():
        return
    # There is no cache to empty.
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.empty_host_cache = lambda: None


# Prefixes of vLLM 0.30's warnings about decisions of this platform, which users cannot change.
_EXPECTED = (
    "Async scheduling not supported with",
    "max_num_scheduled_tokens is set to",
    "Inductor compilation was disabled by user settings",
    "There is a latency regression when using chunked local attention",
    "Model Runner V2 requires Triton",
    "Using custom scheduler class rbln_backend.",
)
# Our loggers are one level more verbose: a start-up logs a dozen lines, vLLM's fifty.
_LEVELS = {logging.WARNING: logging.INFO, logging.ERROR: logging.WARNING}


def drop_expected_warnings() -> None:
    """Suppress warnings of vLLM and torch about intended behaviour; idempotent, imports nothing."""
    for handler in logging.getLogger("vllm").handlers:
        if _is_news not in handler.filters:
            handler.addFilter(_is_news)
    # Warns about missing Triton at every capture.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def share_logging() -> None:
    """Give our loggers vLLM's handlers and format, at a level that follows vLLM's."""
    upstream, logger = logging.getLogger("vllm"), logging.getLogger("rbln_backend")
    level = _LEVELS.get(upstream.level, upstream.level)
    logger.handlers = [_like(handler, level) for handler in upstream.handlers]
    logger.setLevel(level)
    logger.propagate = False


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.getMessage()).startswith(_EXPECTED)


def _like(handler: logging.Handler, level: int) -> logging.Handler:
    if not isinstance(handler, logging.StreamHandler):
        return handler
    copied: logging.Handler = logging.StreamHandler(handler.stream)
    copied.setFormatter(handler.formatter)
    copied.setLevel(level)
    return copied
