"""Launches the engine from vLLM's command line, tests it, and reports its failure.

All slow work runs in one daemon thread, so that the event loop answers probes and a stop during
start-up does not wait. Invariant: a launched engine has answered a request.
The request of its test also starts vLLM's tasks.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import logging
import platform
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbln_backend import api
from rbln_backend.api.names import (
    LastStart,
    ProgressReader,
    computed_rows,
    read_descriptions,
    resolve,
)
from rbln_backend.errors import ConfigError
from rbln_backend.host.resources import vllm_build
from server import __version__
from server.engine.config import engine_config, launch_error
from server.engine.process import (
    HangWatch,
    IdleWatch,
    end_engine_processes,
    engine_first,
    engine_processes,
)
from server.engine.socket import EngineSocket, receive_directly, watch_others
from server.engine.weight_files import read_ahead, refuse_damaged_weights
from server.frontend import LaunchError
from server.host.tasks import in_daemon_thread, in_thread, without_garbage_collection
from server.observability.logging import bound_vllm_log
from server.settings import ServerSettings
from server.vllm.patches import allow_stop_strings, check_shapes, choose_start_method

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tasks import SupportedTask
    from vllm.v1.engine.async_llm import AsyncLLM

    from server.vllm.engine_client import EngineClient
    from server.vllm.frontend import VllmFrontend

logger = logging.getLogger(__name__)

_ENGINE = "engine"
# By name: linters remove import statements without a use.
_SERVING_MODULES = (
    "server.vllm.frontend",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.launchers.api_server.app_state",
)
# What is replaced before the engine starts, and what `build_frontend` replaces.
_ENGINE_NAMES = ("vllm.v1.", "vllm.renderers.registry.")
_SERVING_NAMES = ("vllm.envs.", "vllm.entrypoints.", "vllm.renderers.hf.", "vllm.renderers.params.")


class VllmEngine:
    """A running AsyncLLM with its front end."""

    def __init__(
        self, engine: EngineClient, frontend: VllmFrontend, hang: HangWatch, idle: IdleWatch
    ) -> None:
        self.frontend = frontend
        self._engine = engine
        self._others = watch_others(engine)
        self._hang_watch, self._idle_watch = hang, idle
        self._hang: str | None = None
        self._processes = engine_processes()
        # After the engine's processes are listed; referenced, so that the task is not collected.
        self._warming = asyncio.ensure_future(frontend.warm_up())

    def failure(self) -> str | None:
        """Return why the engine has failed, None while it runs; kills an engine that hangs."""
        if self._hang is not None:
            return self._hang
        if self._others is not None and (end := self._others.lost()) is not None:
            return f"a data-parallel engine of another host has closed its connection to {end}"
        for process in self._processes:
            if process.exitcode is not None:
                return f"engine process {process.name} ended with exit code {process.exitcode}"
        if self._engine.errored:
            return "the engine reported a fatal error"
        self._hang = self._find_hang()
        if self._hang is not None:
            # Waiting clients notice when the process exits.
            self.kill()
        return self._hang

    def _find_hang(self) -> str | None:
        limit = "the limit of --step-timeout-s, and was killed"
        if (silent_s := self._hang_watch.hung_for_s()) is not None:
            return f"the engine has hung for {silent_s:.0f} s, {limit}"
        if (idle_s := self._idle_watch.idle_for_s()) is not None:
            requests = self._engine.output_processor.request_states
            logger.error("No step ran for these requests: %s", ", ".join([*requests][:10]))
            return (
                f"the engine has {len(requests)} requests and ran no step for {idle_s:.0f} s, "
                f"{limit}"
            )
        return None

    async def shutdown(self, timeout_s: float) -> None:
        """Stop the engine process; kill it after `timeout_s` seconds."""
        if (handler := self._engine.output_handler) is not None:
            # It would report the shutdown as a failure and log a traceback.
            handler.cancel()
        await in_thread(partial(self._engine.shutdown, timeout=timeout_s))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


class Launcher:
    """Reads vLLM's command line and makes the engine's configuration; a subclass starts it."""

    def __init__(self, argv: Sequence[str], settings: ServerSettings, run_dir: Path) -> None:
        self._argv = list(argv)
        self._settings = settings
        self._run_dir = run_dir
        self._model = ""
        self._last_start = _last_start()
        self._built: Future[Any] | None = None
        self._parts = StartParts()

    @property
    def building(self) -> bool:
        """True while the thread that builds the engine runs."""
        return self._built is not None and not self._built.done()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the components, without importing them."""
        return {
            "version": __version__,
            "vllm": vllm_build().version,
            "torch": importlib.metadata.version("torch"),
            "python": platform.python_version(),
            "platform": f"{platform.system()}-{platform.machine()}".lower(),
        }

    def expected_s(self) -> float | None:
        """Return the seconds of the last start with this cache root, None if they are unknown."""
        return None if self._last_start is None else self._last_start.seconds()

    def keep_ready_s(self, seconds: float) -> None:
        """Record the seconds of this start."""
        if self._last_start is not None:
            self._last_start.keep(seconds)

    async def abandon(self) -> None:
        """End the engine processes of an unfinished launch."""
        await in_thread(end_engine_processes)

    def _configure(self) -> tuple[Namespace, AsyncEngineArgs, VllmConfig]:
        """Import vLLM and make the engine's configuration from the flags."""
        in_daemon_thread(partial(read_ahead, self._argv))
        # Before vLLM parses the flags, whose defaults come from the platform.
        api.refuse_second_plugin()
        allow_stop_strings(self._settings.max_stop)
        from server.vllm.flags import parse_arguments

        self._parts.end("imports")
        args = parse_arguments(self._argv, self._settings, may_fetch=True)
        self._model = args.model
        refuse_damaged_weights(args.model, args.load_format)
        engine_args, vllm_config = engine_config(args, self._settings, self._run_dir)
        choose_start_method("spawn" if args.numa_bind else self._settings.engine_start)
        return args, engine_args, vllm_config


class VllmLauncher(Launcher):
    """Builds the engine with its front end."""

    async def launch(self) -> VllmEngine:
        """Build the engine and test it with one request. Raises `LaunchError`."""
        self._parts = StartParts()
        # Modules and the engine's objects are never freed.
        with without_garbage_collection():
            try:
                self._built = in_daemon_thread(self._build)
                args, engine, socket = await asyncio.wrap_future(self._built)
                tasks = await engine.get_supported_tasks()
                from server.vllm.frontend import build_frontend

                frontend = await build_frontend(engine, args, tasks, self._settings)
                self._parts.end("front end")
                await self_test(engine, tasks)
                self._parts.end("self-test")
                logger.info("start-up: %s", self._parts.line({_ENGINE: self._engine_phases()}))
                bound_vllm_log()
                limit_s = self._settings.step_timeout_s
                engines = engine.vllm_config.parallel_config.data_parallel_size
                return VllmEngine(
                    engine,
                    frontend,
                    HangWatch(limit_s, lambda: socket.num_messages, engine.is_sleeping),
                    IdleWatch(
                        limit_s,
                        engine.get_num_unfinished_requests,
                        partial(computed_rows, self._run_dir, engines),
                    ),
                )
            except Exception as error:
                # The boundary of start-up: every failure ends the process with a reason.
                logger.debug("Start-up failed", exc_info=True)
                reported = ProgressReader(self._run_dir).poll().failure
                raise launch_error(error, self._model, reported) from error

    def _build(self) -> tuple[Namespace, EngineClient, EngineSocket]:
        args, engine_args, vllm_config = self._configure()
        from vllm.usage.usage_lib import UsageContext

        from server.engine.outputs import defer_stats, install_output_processor
        from server.vllm.engine_client import EngineClient

        self._parts.end("configuration")
        # Before any of them is replaced.
        check_shapes(*_ENGINE_NAMES)
        # The engine process loads the model while this one imports vLLM's serving modules.
        serving = in_daemon_thread(import_serving)
        with engine_first(vllm_config, log_stats=not engine_args.disable_log_stats):
            engine = EngineClient.from_vllm_config(
                vllm_config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=engine_args.enable_log_requests,
                aggregate_engine_logging=engine_args.aggregate_engine_logging,
                disable_log_stats=engine_args.disable_log_stats,
            )
        assert isinstance(engine, EngineClient)
        defer_stats(engine)
        socket = receive_directly(engine)
        install_output_processor(
            engine, self._settings.max_queue_s, logs_deltas=args.enable_log_outputs
        )
        self._parts.end(_ENGINE)
        serving.result()
        return args, engine, socket

    def _engine_phases(self) -> dict[str, float]:
        """Return the seconds of the engine's phases on the slowest rank, in order."""
        phases: dict[str, float] = {}
        for rank in read_descriptions(self._run_dir):
            for phase, seconds in rank.get("phases", {}).items():
                phases[phase] = max(seconds, phases.get(phase, 0.0))
        return phases


def import_serving() -> None:
    """Import what `build_frontend` needs; called in a thread while the engine loads the model."""
    for name in _SERVING_MODULES:
        importlib.import_module(name)
    check_shapes(*_SERVING_NAMES)


def _last_start() -> LastStart | None:
    try:
        return LastStart(Path(resolve(None).config.cache_root))
    except ConfigError:
        # The engine's configuration reports this error with all settings.
        return None


_TIMEOUT_S = 120.0
_REQUEST_ID = "self-test"


async def self_test(engine: AsyncLLM, tasks: tuple[SupportedTask, ...]) -> None:
    """Generate one token or one pooled vector. Raises `LaunchError` or `TimeoutError`."""
    from vllm import PoolingParams, SamplingParams
    from vllm.inputs import tokens_input

    prompt, size = tokens_input([1]), 0
    async with asyncio.timeout(_TIMEOUT_S):
        if "generate" in tasks:
            params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            async for answer in engine.generate(prompt, params, _REQUEST_ID):
                size = len(answer.outputs[0].token_ids)
        else:
            pooling = PoolingParams(task=engine.model_config.get_pooling_task(tasks))
            async for result in engine.encode(prompt, pooling, _REQUEST_ID):
                size = int(result.outputs.data.numel())
    if not size:
        raise LaunchError("the self-test got no result")


class StartParts:
    """Parts that follow one another; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """Record the seconds since the end of the part before as those of `part`."""
        now = self._clock()
        self._seconds[part] = now - self._since
        self._since = now

    def line(self, inside: Mapping[str, Mapping[str, float]]) -> str:
        """Return all parts as one line; `inside` has seconds of what is inside some of them."""
        texts = []
        for part, seconds in self._seconds.items():
            parts = ", ".join(f"{name} {s:.2f}" for name, s in inside.get(part, {}).items())
            texts.append(f"{part} {seconds:.2f} s{f' ({parts})' if parts else ''}")
        return ", ".join(texts)
