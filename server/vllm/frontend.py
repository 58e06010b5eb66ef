"""`server.frontend.Frontend` over vLLM's serving classes.

vLLM's serving classes render prompts, drive the engine and shape the answers. This server checks
fields and limits, and raises every error as a `ServerError`. tests/server/vllm/test_messages.py
compares the names used with vLLM's.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm import envs
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.tasks import SupportedTask

from rbln_backend import api
from server import bounds
from server.admission import Capacity
from server.errors import (
    ContextLengthError,
    InternalError,
    ModelNotFoundError,
    ServerError,
    describe,
)
from server.frontend import ParsedRequest, Profiler, WireSchemas
from server.host.job_pool import JobPool, WorkerStartError, process_starter
from server.host.tasks import in_thread
from server.lora.registry import AdapterRegistry
from server.observability.tracing import OPERATIONS, Tracing
from server.request.endpoints import get_forms
from server.request.options import check_headers
from server.request.record import RequestRecord
from server.request.rules import IGNORED_HEADER
from server.request.tables import extra_schemas, refused_fields
from server.settings import ServerSettings
from server.structured_outputs.gate import GrammarGate, make_gate
from server.tools import NO_CALLS, ToolSupport
from server.vllm import text_stream
from server.vllm.engine_client import EngineClient, lease, open_adapters
from server.vllm.errors import RefusedError, RequestContext, engine_failed, from_exception
from server.vllm.handlers import (
    Handler,
    describe_answer,
    describe_request,
    described_frames,
    extended_frames,
    handlers,
    name_model,
)
from server.vllm.models import request_models
from server.vllm.patches import (
    count_whole_prompts,
    keep_special_tokens,
    leave_tags_to_the_gate,
    skip_processor,
)
from server.vllm.reading import BodyReader, RequestReader, make_request_rules, serve_reading
from server.vllm.rendering import RemoteTemplates, large_var, render_elsewhere, sanitizer
from server.vllm.templates import get_templates
from server.vllm.tools import check_parsers, choose_tools, template_tokenizer
from server.wire import Endpoint, JsonObject

logger = logging.getLogger(__name__)

_BUILT_FORMS = ("chat", "completion")
"""Forms whose validators exist when the server is ready."""


async def build_frontend(
    engine: EngineClient,
    args: Namespace,
    tasks: tuple[SupportedTask, ...],
    settings: ServerSettings,
) -> VllmFrontend:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    text_stream.install()
    leave_tags_to_the_gate()
    count_whole_prompts()
    engine.grammars = make_gate(engine.vllm_config, settings) if "generate" in tasks else None
    envs.enable_envs_cache()  # vLLM reads some for every token; none changes any more
    state = State()
    static, args.lora_modules = args.lora_modules, None
    tools = NO_CALLS
    if "generate" in tasks:
        model_config = engine.vllm_config.model_config
        tokenizer = template_tokenizer(model_config, engine.renderer.tokenizer)
        skip_processor(model_config, tokenizer)
        tools = choose_tools(args, tokenizer, model_config, settings)
        check_parsers(args, engine.renderer.tokenizer, model_config)
        logger.info("tools are %s", tools)
    else:
        keep_special_tokens(engine.renderer.tokenizer)
    await init_app_state(engine, state, args, tasks)
    state.adapters = await open_adapters(engine, state.openai_serving_models, static, settings)
    tracing = None if args.otlp_traces_endpoint is None else Tracing()
    keep_alive_s = float(args.sse_keep_alive_interval)
    return VllmFrontend(engine, state, tasks, settings, keep_alive_s, tracing, tools)


class VllmFrontend:
    """Answers requests with vLLM's serving classes; implements `server.frontend.Frontend`."""

    def __init__(
        self,
        engine: EngineClient,
        state: State,
        tasks: tuple[SupportedTask, ...],
        settings: ServerSettings,
        keep_alive_s: float,
        tracing: Tracing | None,
        tools: ToolSupport,
    ) -> None:
        self.tools = tools
        self.adapters: AdapterRegistry | None = state.adapters
        self.grammars: GrammarGate | None = engine.grammars
        self.profiler: Profiler | None = engine if api.profiles(engine.vllm_config) else None
        self._engine = engine
        self._models = state.openai_serving_models
        shown = state.args.enable_tokenizer_info_endpoint
        self._tokenization = state.serving_tokenization if shown else None
        self._policy = settings.unknown_fields
        self.keep_alive_s, self.tracing = keep_alive_s, tracing
        self._handlers = handlers(state)
        offered = frozenset(form for form, h in self._handlers.items() if h.serve is not None)
        self.endpoints = frozenset(e for e in Endpoint if get_forms(e, offered))
        rules = make_request_rules(engine.vllm_config, state, settings, tasks, offered, tools)
        self._limits = rules.limits
        engine.rewrites_tools = rules.rewrites_tools
        self._num_ranks = engine.vllm_config.parallel_config.data_parallel_size
        self._reading = JobPool(
            "reading requests",
            process_starter(
                settings.engine_start, serve_reading, "reading-requests", rules, settings
            ),
            bounds.READ_WORKERS,
            bounds.READ_TIMEOUT_S,
        )
        self._body_reader = BodyReader(rules, request_models())
        self._body_reader.build_validators(_BUILT_FORMS)
        reader = RequestReader(self._body_reader, self._reading)
        self.read, self.take_reading = reader.read, reader.take_counts
        online = state.online_renderer
        get_tokens, encoder = (
            sanitizer(online) if settings.sanitize_control_tokens else (None, None)
        )
        templates = RemoteTemplates(
            reader.render,
            get_templates(online),
            _CHARS_PER_BYTE * settings.max_body_bytes,
            get_tokens,
        )
        render_elsewhere(online.renderer, templates, bounds.READ_WORKERS, encoder)

    async def warm_up(self) -> None:
        """Make what first requests would wait for, once the server is ready.

        A process for large bodies, one for grammars, and the validators of bodies.
        """
        grammars = self._engine.grammars
        try:
            await self._reading.start_one()
            if grammars is not None:
                await grammars.warm_up()
        except WorkerStartError as error:
            logger.warning("%s", error)
        # Last: it holds this process's interpreter for some milliseconds at a time.
        await in_thread(self._body_reader.build_validators)

    @property
    def capacity(self) -> Capacity:
        config = self._engine.vllm_config
        scheduler = config.scheduler_config
        queued = scheduler.max_num_queued_tokens
        return Capacity(scheduler.max_num_seqs, queued, api.decode_buckets(config))

    def schemas(self) -> WireSchemas:
        from server.vllm.models import wire_schemas

        offered = {name: h.model for name, h in self._handlers.items() if h.serve is not None}
        forms = {
            endpoint: [offered[form] for form in get_forms(endpoint, offered)]
            for endpoint in Endpoint
        }
        return wire_schemas(
            {endpoint: models for endpoint, models in forms.items() if models},
            extra_fields={endpoint: extra_schemas(endpoint) for endpoint in Endpoint},
            without={endpoint: refused_fields(endpoint) for endpoint in Endpoint},
            closed=self._policy == "reject",
        )

    async def reset_prefix_cache(self, *, preempt: bool, tiers: bool) -> bool:
        return await self._engine.reset_prefix_cache(
            reset_running_requests=preempt, reset_connector=tiers
        )

    async def tokenizer_info(self) -> JsonObject | None:
        if self._tokenization is None:
            return None
        info: JsonObject = (await self._tokenization.get_tokenizer_info()).model_dump(mode="json")
        return info

    async def models(self) -> list[JsonObject]:
        served = await self._models.show_available_models()
        cards: list[JsonObject] = served.model_dump(mode="json")["data"]
        return cards

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        record: RequestRecord = request.state.record
        record.drafts = parsed.drafts
        record.custom_tools = parsed.custom_tools
        fields = parsed.fields
        record.echoes_only = bool(fields.get("echo")) and fields.get("max_tokens") == 0
        record.has_beams = bool(fields.get("use_beam_search"))
        record.compacts = parsed.compacts
        if parsed.ignored:
            record.answer_headers[IGNORED_HEADER] = ", ".join(parsed.ignored)
        if record.span is not None:
            describe_request(record.span, endpoint, fields)
        name = fields.get("model")
        if not isinstance(name, str):
            name = str(self._models.model_name())
        elif not self._models.is_base_model(name) and (
            self.adapters is None or not lease(self.adapters, name, record)
        ):
            served = ", ".join(repr(card["id"]) for card in await self.models())
            raise ModelNotFoundError(
                f"The model {describe(name)} does not exist; this server has {served}.",
                param="model",
            )
        if record.span is not None:
            name_model(record.span, endpoint, name)
        check_headers(
            request.headers,
            fields.get("priority"),
            record.tier,
            has_priorities=self._limits.has_priorities,
            num_ranks=self._num_ranks,
        )
        if self.grammars is not None and parsed.constraints:
            record.grammars = await self.grammars.check(parsed.constraints, record.guided_by)
        large_var.set(parsed.is_large)
        context = RequestContext(
            parsed.fields, parsed.error_field, self._limits.max_model_len, parsed.forbidding
        )
        model: Any = parsed.model
        if record.internal is not None and record.internal.response_id:
            model.request_id = record.internal.response_id
        answering = self._answer(self._handlers[parsed.form], model, request, extra_fields, record)
        try:
            if parsed.is_large and endpoint in _WITHOUT_ENGINE:
                # Texts and answers of megabytes run on a loop in another thread.
                answer = await asyncio.to_thread(asyncio.run, answering)
            else:
                answer = await answering
        except Exception as error:
            # The boundary to vLLM: all its exceptions are translated.
            raise self._translated(error, context, record) from error
        if isinstance(answer, bytes):
            return answer
        frames = extended_frames(endpoint, answer, extra_fields, record)
        if record.span is not None and endpoint in OPERATIONS:
            frames = described_frames(record, endpoint, frames)
        return self._frames(frames, context, record)

    async def _answer(
        self,
        handler: Handler,
        model: BaseModel,
        request: Request,
        extra_fields: JsonObject,
        record: RequestRecord,
    ) -> bytes | AsyncGenerator[Any, None]:
        assert handler.serve is not None
        result = await handler.serve(model, request)
        if record.span is not None:
            describe_answer(record.span, result)
        if isinstance(result, ErrorResponse):
            error = result.error
            raise RefusedError(error.message, error.code, error.param)
        if isinstance(result, Response):
            return bytes(result.body)
        if isinstance(result, BaseModel):
            return handler.to_body(result, extra_fields, record)
        frames: AsyncGenerator[Any, None] = result
        return frames

    async def _frames(
        self, frames: AsyncGenerator[str, None], context: RequestContext, record: RequestRecord
    ) -> AsyncGenerator[str, None]:
        try:
            async with aclosing(frames) as stream:
                async for frame in stream:
                    yield frame
        except Exception as error:
            # The boundary to vLLM, as in `handle`.
            raise self._translated(error, context, record) from error

    def _translated(
        self, error: Exception, context: RequestContext, record: RequestRecord
    ) -> ServerError:
        if record.failure is not None:
            # vLLM's classes do not pass the cause on.
            return record.failure
        translated = from_exception(error, replace(context, guided=record.guide is not None))
        if isinstance(translated, ContextLengthError) and translated.param is None:
            translated.param = context.prompt
        if isinstance(translated, InternalError) and self._engine.errored:
            # vLLM reports a dead engine as an error of each request.
            return engine_failed()
        return translated


_CHARS_PER_BYTE = 4
"""Largest ratio of a prompt's characters to the body limit; a template multiplied longer ones."""
_WITHOUT_ENGINE = (
    Endpoint.TOKENIZE,
    Endpoint.DETOKENIZE,
    Endpoint.RENDER_CHAT,
    Endpoint.RENDER_COMPLETION,
)
