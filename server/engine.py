"""The engine: command line to AsyncLLM, its self-test, its death, its end.

Everything slow happens in one daemon thread, so that the event loop answers probes meanwhile
and a stop during start-up need not wait for it. Invariant: an engine that was handed out has
generated a token.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from server import __version__
from server.engine_process import (
    choose_start_method,
    end_engine_processes,
    engine_processes,
)
from server.frontend import Frontend, LaunchError
from server.settings import ServerSettings

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SELF_TEST_TIMEOUT_S = 120.0


class VllmEngine:
    """A running AsyncLLM with its front end."""

    def __init__(self, engine: AsyncLLM, frontend: Frontend) -> None:
        self._engine = engine
        self._frontend = frontend
        self._processes = engine_processes()

    @property
    def frontend(self) -> Frontend:
        """What answers requests."""
        return self._frontend

    def failure(self) -> str | None:
        """Return why the engine is dead, None while it lives."""
        for process in self._processes:
            if process.exitcode is not None:
                return f"engine process {process.name} ended with exit code {process.exitcode}"
        return "the engine reported a fatal error" if self._engine.errored else None

    async def shutdown(self, timeout_s: float) -> None:
        """Stop the engine process; it is killed after `timeout_s` seconds."""
        if (handler := self._engine.output_handler) is not None:
            # It would take the end of the engine for its death and log a traceback.
            handler.cancel()
        await asyncio.to_thread(self._engine.shutdown, timeout=timeout_s)


class VllmLauncher:
    """Builds the engine from vLLM's command line."""

    def __init__(self, argv: Sequence[str], settings: ServerSettings, run_dir: Path) -> None:
        self._argv = list(argv)
        self._settings = settings
        self._run_dir = run_dir
        self._built: Future[tuple[Namespace, AsyncLLM]] | None = None

    @property
    def building(self) -> bool:
        """Whether the thread that builds the engine is still at work."""
        return self._built is not None and not self._built.done()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what runs, without importing it."""
        return {
            "version": __version__,
            "vllm": importlib.metadata.version("vllm"),
            "torch": importlib.metadata.version("torch"),
            "python": platform.python_version(),
            "platform": f"{platform.system()}-{platform.machine()}".lower(),
        }

    async def launch(self) -> VllmEngine:
        """Build the engine and prove it with one token. Raises `LaunchError`."""
        # Modules and the engine's objects live until the end: collecting finds nothing.
        gc.disable()
        try:
            self._built = in_daemon_thread(self._build)
            args, engine = await asyncio.wrap_future(self._built)
            tasks = await engine.get_supported_tasks()
            from server.vllm_frontend import build_frontend

            frontend = await build_frontend(engine, args, tasks, self._settings)
            if "generate" in tasks:
                await asyncio.wait_for(_self_test(engine), _SELF_TEST_TIMEOUT_S)
            return VllmEngine(engine, frontend)
        except (LaunchError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The boundary of start-up: whatever failed in there ends the process with a reason.
            logger.debug("Start-up failed", exc_info=True)
            raise LaunchError(f"{type(error).__name__}: {error}") from error
        finally:
            gc.freeze()
            gc.enable()

    async def abandon(self) -> None:
        """End the engine processes of a launch that is under way."""
        await asyncio.wrap_future(in_daemon_thread(end_engine_processes))

    def _build(self) -> tuple[Namespace, AsyncLLM]:
        from server.vllm_frontend import import_serving, parse_arguments

        args = parse_arguments(self._argv, self._settings)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        choose_start_method("spawn" if args.numa_bind else self._settings.engine_start)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        engine_args.additional_config = self._with_run_dir(engine_args.additional_config)
        # An engine that gets the signal together with us must drain as we do.
        engine_args.shutdown_timeout = math.ceil(self._settings.drain_timeout_s)
        context = UsageContext.OPENAI_API_SERVER
        vllm_config = engine_args.create_engine_config(usage_context=context)
        # The engine process loads the model while this one imports what serves it.
        serving = in_daemon_thread(import_serving)
        engine = AsyncLLM.from_vllm_config(
            vllm_config,
            usage_context=context,
            enable_log_requests=engine_args.enable_log_requests,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            disable_log_stats=engine_args.disable_log_stats,
        )
        serving.result()
        return args, engine

    def _with_run_dir(self, additional: Mapping[str, Any]) -> dict[str, Any]:
        ours = additional.get("rbln", {})
        if not isinstance(ours, dict):
            raise LaunchError(
                f"--additional-config: 'rbln' must be an object, got {ours!r}", exit_code=2
            )
        return {**additional, "rbln": {**ours, "run_dir": str(self._run_dir)}}


async def _self_test(engine: AsyncLLM) -> None:
    """Generate one token from the event loop: starts the engine's tasks and proves the path."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for output in engine.generate(tokens_input([1]), params, "self-test"):
        if output.finished and len(output.outputs[0].token_ids) != 1:
            raise LaunchError("the self-test generated no token")


def in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that a process exit does not wait for."""
    future: Future[T] = Future()
    # From here on nobody can cancel it: a thread cannot be stopped.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001
            # Also SystemExit of a parser: it belongs to whoever waits, not to this thread.
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(work, "__name__", "work")).start()
    return future
