"""The server's interface to the backend, besides the engine that it runs.

The functions of this module need vLLM, and import it when they are called. ``names`` exports what
needs neither torch nor vLLM. The server imports nothing else of the backend but
`buckets`, `usage`, `errors` and `host` (contract `server-door`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbln_backend.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.reasoning import ReasoningParser

    from rbln_backend.grammar.trial import GrammarTrial
    from rbln_backend.graphs.cache import CacheKey
    from rbln_backend.reports.info import CompileReport, ModelReport, StoreReport


_PLUGIN = "rbln"
_REGISTER = "rbln_backend:register"


def refuse_second_plugin() -> None:
    """Raise ``PlatformError`` if another package has a platform plug-in of the same name.

    vLLM would run the one that it finds last, without a message. As a general plug-in this function
    is called before an engine is configured, whichever was found last.
    """
    from importlib.metadata import entry_points

    from vllm import envs
    from vllm.plugins import PLATFORM_PLUGINS_GROUP

    if envs.VLLM_PLUGINS is not None and _PLUGIN not in envs.VLLM_PLUGINS:
        return
    for plugin in entry_points(group=PLATFORM_PLUGINS_GROUP, name=_PLUGIN):
        if plugin.value != _REGISTER:
            owner = "another package" if plugin.dist is None else plugin.dist.name
            raise PlatformError(
                f"two platform plug-ins are called {_PLUGIN!r}: {plugin.value} of {owner} and "
                f"{_REGISTER} of rbln-serve, and vLLM runs the one that it finds last; uninstall "
                f"{owner}, or give each an environment of its own"
            )


def is_active() -> bool:
    """Return whether vLLM runs on this platform; the first call makes vLLM choose one."""
    return _other_platform() is None


def load_worker() -> None:
    """Import the modules of an engine process. Raises ``PlatformError``."""
    _require_platform()
    import numpy.random  # for seeds
    import vllm.model_executor.layers.quantization.online.base  # of which vLLM's loader asks

    import rbln_backend.scheduler.scheduler  # which vLLM imports by name
    import rbln_backend.worker.worker


def refuse_model(config: ModelConfig) -> None:
    """Raise ``UnsupportedModelError`` if no configuration could make the model run.

    vLLM checks the rest of a configuration before it calls the platform, and may report an error
    that only follows from an unsupported kind of model.
    """
    from rbln_backend.refusals import refuse_model

    refuse_model(config)


def profiles(config: VllmConfig) -> bool:
    """Return whether an engine of this configuration can record profiles."""
    from rbln_backend.settings import EngineSettings

    settled = config.additional_config
    return isinstance(settled, EngineSettings) and settled.rbln.profiler


def decode_buckets(config: VllmConfig) -> tuple[int, ...]:
    """Return the sizes of decode graphs, ascending; none for a model that pools.

    Raises ``PlatformError``.
    """
    _require_platform()
    # Not through ``surface``, which imports the engine's layers.
    from rbln_backend.settings import compiled_sizes

    return tuple(compiled_sizes(config).decode or ())


def missing_token_ids(tokenizer: object, vocab_size: int) -> list[int]:
    """Return the ids below ``vocab_size`` without a token, ascending; none without a tokenizer."""
    from rbln_backend.models import missing_token_ids

    return missing_token_ids(tokenizer, vocab_size)


def inspect_model(config: VllmConfig) -> ModelReport:
    """Describe a model that can run; raises the reason why it cannot, or ``PlatformError``."""
    _require_platform()
    from rbln_backend.worker.check import inspect_model

    return inspect_model(config)


def compile_model(config: VllmConfig, targets: Sequence[str]) -> CompileReport:
    """Fill the store with a model's graphs, and with kernels for the CPUs named by ``targets``.

    Raises ``ConfigError`` where nothing can be stored, whatever a start raises, ``PlatformError``.
    """
    _require_platform()
    from rbln_backend.worker.precompile import compile_model

    return compile_model(config, targets)


def survey_store(config: VllmConfig, cache_root: str) -> StoreReport:
    """Report which of a model's graphs ``cache_root`` has; raises like ``inspect_model``."""
    _require_platform()
    from rbln_backend.worker.check import survey_store

    return survey_store(config, cache_root)


def store_versions() -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the fields that identify this version's graphs, and its kernel libraries' keys.

    Raises ``PlatformError``.
    """
    _require_platform()
    from rbln_backend.worker.check import store_versions

    return store_versions()


def check_graph(key: CacheKey, files: Mapping[str, bytes]) -> bool:
    """Raise ``CorruptArtifactError`` for stored files that a start would not load as a graph.

    False for a graph of another version, which is not checked. Imports torch, but not vLLM.
    """
    from rbln_backend.worker.stored_graphs import check_graph

    return check_graph(key, files)


def describe_cpu() -> dict[str, str]:
    """Return the CPU's name and the levels of kernels that it runs.

    Imports neither torch nor vLLM.
    """
    from rbln_backend.devices.emulated.build import LEVELS, cpu_name

    levels = ", ".join(level.name for level in LEVELS if level.runs_here())
    return {"cpu": cpu_name(), "kernels": levels}


def check_connectors(transfer: KVTransferConfig) -> None:
    """Raise ``ConfigError`` for a list of connectors that vLLM would fail on without a reason."""
    from rbln_backend.kv_transfer.options import several_connectors

    several_connectors(transfer)


def marked_reasoning(parser: type[ReasoningParser] | None) -> type[ReasoningParser] | None:
    """Return the class that reads reasoning as the engine does, for one of vLLM's parsers.

    It is a `MarkedReasoning`, or `parser` itself where vLLM's reads by more than markers.
    """
    if parser is None:
        # The import is a tenth of a warm start: vLLM's parsers, and Mistral's library with them.
        return None
    from rbln_backend.grammar.reasoning import marked_reasoning

    return marked_reasoning(parser)  # type: ignore[arg-type]


def grammar_trial(
    config: VllmConfig, making: Callable[[], AbstractContextManager[None]]
) -> GrammarTrial:
    """Return a trial that compiles grammars as the engine does. Raises ``PlatformError``.

    ``making`` is entered while it makes what no single grammar needs.
    """
    _require_platform()
    from rbln_backend.grammar.trial import GrammarTrial

    return GrammarTrial(config, making)


def _require_platform() -> None:
    other = _other_platform()
    if other is not None:
        raise PlatformError(
            f"vLLM runs on {other} here, not on the RBLN platform; see VLLM_PLUGINS"
        )


def _other_platform() -> str | None:
    """Return the name of the platform that vLLM has chosen, None for this one."""
    from vllm.platforms import current_platform

    from rbln_backend.platform import RblnPlatform

    is_ours = isinstance(current_platform, RblnPlatform)
    return None if is_ours else type(current_platform).__name__
