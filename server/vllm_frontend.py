"""vLLM's front end behind our port; the only importer of `vllm.entrypoints`.

vLLM's serving classes render prompts, drive the engine and shape the answers. Everything
around them is ours: which flags and fields are taken, limits, and errors, which all leave here
as `ServerError`. What is used of vLLM is pinned by tests/http/test_vllm_contract.py.
"""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from server import stream_chunks
from server.errors import (
    InternalError,
    ModelNotFoundError,
    ServerError,
    UnsupportedOperationError,
    describe,
)
from server.frontend import Endpoint, JsonObject, LaunchError
from server.pooling_limits import PoolingLimits, check_pooling_limits
from server.request_fields import accepted_fields, check_nested, model_field_names
from server.request_forms import request_form
from server.request_limits import Limits, check_limits
from server.settings import ServerSettings
from server.text_only import refuse_media
from server.vllm_errors import engine_failed, from_exception, from_payload

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.tasks import SupportedTask
    from vllm.v1.engine.async_llm import AsyncLLM

_USAGE = "rbln-serve serve MODEL [options] [vLLM options]"
_OURS = "this server has its own: see `rbln-serve serve --help`"
_ABSENT = "this server does not offer it"
_REFUSED_FLAGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "uvicorn_log_level",
            "disable_uvicorn_access_log",
            "disable_access_log_for_endpoints",
            "h11_max_incomplete_event_size",
            "h11_max_header_count",
            "shutdown_timeout",
        ),
        _OURS,
    ),
    **dict.fromkeys(
        (
            "headless",
            "grpc",
            "api_server_count",
            "data_parallel_multi_port_external_lb",
            "uds",
            "middleware",
            "enable_offline_docs",
            "enable_tokenizer_info_endpoint",
            "enable_server_load_tracking",
            "enable_scale_out",
            "tokens_only",
            "enable_fault_tolerance",
            "cohere_is_reasoning_model",
            "cohere_format",
        ),
        _ABSENT,
    ),
}
"""vLLM flags that would be accepted and then ignored, with the reason that is given."""


def parse_arguments(argv: Sequence[str], settings: ServerSettings) -> Namespace:
    """Parse vLLM's flags. Raises `LaunchError` with exit code 2 for any that cannot be taken."""
    parser = make_arg_parser(
        FlexibleArgumentParser(prog="rbln-serve serve", usage=_USAGE, add_help=False)
    )
    # What a prefix hit saved is told unless --no-enable-prompt-tokens-details asks otherwise.
    parser.set_defaults(enable_prompt_tokens_details=True)
    try:
        args: Namespace = parser.parse_args(list(argv))
        if args.model_tag is not None:
            args.model = args.model_tag
        validate_parsed_serve_args(args)
    except SystemExit as error:
        raise LaunchError("the command line is wrong, as said above", exit_code=2) from error
    except (TypeError, ValueError) as error:
        raise LaunchError(str(error), exit_code=2) from error
    if args.model.startswith(("/", ".", "~")) and not Path(args.model).expanduser().is_dir():
        raise LaunchError(f"MODEL: there is no directory {args.model!r}", exit_code=2)
    for name, reason in _REFUSED_FLAGS.items():
        if getattr(args, name, None) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise LaunchError(f"{flag} cannot be used: {reason}", exit_code=2)
    args.host, args.port = settings.host, settings.port
    return args


def print_help(topic: str) -> None:
    """Print vLLM's own help: `all`, a group of flags, or what matches a word."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="rbln-serve serve", usage=_USAGE))
    with suppress(SystemExit):
        parser.parse_args([f"--help={topic}"])


# By name: an import statement without a use looks like a leftover, and was once removed as one.
_SERVING_MODULES = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.pooling.classify.protocol",
    "vllm.entrypoints.pooling.embed.protocol",
    "vllm.entrypoints.pooling.pooling.protocol",
    "vllm.entrypoints.pooling.scoring.protocol",
)


def import_serving() -> None:
    """Import what `build_frontend` needs, so that it does not hold up the event loop."""
    for name in _SERVING_MODULES:
        importlib.import_module(name)


async def build_frontend(
    engine: AsyncLLM, args: Namespace, tasks: tuple[SupportedTask, ...], settings: ServerSettings
) -> VllmFrontend:
    """Build vLLM's serving classes around a running engine."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.openai.chat_completion import serving as chat

    stream_chunks.install(chat)
    envs.enable_envs_cache()  # vLLM looks some up for every token; none changes any more
    state = State()
    await init_app_state(engine, state, args, tasks)
    return VllmFrontend(engine, state, tasks, settings, float(args.sse_keep_alive_interval))


@dataclass(frozen=True, slots=True)
class _Handler:
    """One endpoint of vLLM: its request model, what serves it, how its answers are shaped."""

    model: type[BaseModel]
    serve: Callable[[Any, Request], Awaitable[Any]] | None
    by_alias: bool = False
    exclude_none: bool = False


class VllmFrontend:
    """Answers requests with vLLM's serving classes; implements `server.frontend.Frontend`."""

    def __init__(
        self,
        engine: AsyncLLM,
        state: State,
        tasks: tuple[SupportedTask, ...],
        settings: ServerSettings,
        keep_alive_s: float,
    ) -> None:
        self._engine = engine
        self._models = state.openai_serving_models
        self._policy = settings.unknown_fields
        self._keep_alive_s = keep_alive_s
        scheduler = engine.vllm_config.scheduler_config
        self._limits = Limits(
            # More answers than sequences would wait for each other.
            max_n=min(settings.max_n, scheduler.max_num_seqs),
            max_messages=settings.max_messages,
            max_prompts=settings.max_prompts,
            max_model_len=engine.model_config.max_model_len,
            vocab_size=engine.model_config.get_vocab_size(),
            has_priorities=scheduler.policy == "priority",
        )
        self._pooling_limits = PoolingLimits(
            max_prompts=settings.max_prompts,
            max_model_len=engine.model_config.max_model_len,
            vocab_size=engine.model_config.get_vocab_size(),
            dimensions=_dimensions(engine.model_config),
        )
        self._text_only = not engine.model_config.is_multimodal_model
        self._does = _in_words(tasks, engine.model_config)
        self._handlers = {**_handlers(state), **_pooling_handlers(state)}

    async def models(self) -> list[JsonObject]:
        """Return the served models and adapters as OpenAI's model objects."""
        served = await self._models.show_available_models()
        cards: list[JsonObject] = served.model_dump(mode="json")["data"]
        return cards

    async def handle(
        self, endpoint: Endpoint, body: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        """Answer one request; see `server.frontend.Frontend`."""
        handler = self._handlers[request_form(endpoint, body)]
        if handler.serve is None:
            raise UnsupportedOperationError(
                f"{endpoint.value} is not offered: the served model {self._does}."
            )
        known = model_field_names(handler.model)
        fields = accepted_fields(endpoint, body, known, self._policy)
        await self._check_model(fields)
        check_limits(fields, self._limits)
        if self._text_only:
            refuse_media(fields)
        if endpoint.pools:
            check_pooling_limits(fields, self._pooling_limits)
        try:
            # JSON's own rules and no coercion: a string is not a number, and true is not 1.
            parsed = handler.model.model_validate_json(to_json(fields), strict=True)
            check_nested(parsed, fields, self._policy)
            result = await handler.serve(parsed, request)
        except Exception as error:
            # The boundary to vLLM: it raises many kinds, and a client gets exactly ours.
            raise self._translated(error, fields) from error
        if isinstance(result, BaseModel):
            return self._json(handler, result, fields)
        if isinstance(result, Response):
            return bytes(result.body)
        return self._frames(endpoint, result, fields)

    async def _check_model(self, fields: JsonObject) -> None:
        name = fields.get("model")
        if not isinstance(name, str) or self._models.is_base_model(name):
            return
        served = [str(card["id"]) for card in await self.models()]
        if name not in served:
            raise ModelNotFoundError(
                f"The model {describe(name)} does not exist; this server has "
                f"{', '.join(map(repr, served))}.",
                param="model",
            )

    def _json(self, handler: _Handler, result: BaseModel, fields: JsonObject) -> bytes:
        error = getattr(result, "error", None)
        if error is not None and type(result).__name__ == "ErrorResponse":
            raise from_payload(error.model_dump(), fields)
        text = result.model_dump_json(by_alias=handler.by_alias, exclude_none=handler.exclude_none)
        return text.encode()

    async def _frames(
        self, endpoint: Endpoint, events: AsyncGenerator[Any, None], fields: JsonObject
    ) -> AsyncGenerator[str, None]:
        from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

        frames = _named(events) if endpoint is Endpoint.RESPONSES else events
        try:
            async with aclosing(with_sse_keep_alive(frames, self._keep_alive_s)) as stream:
                async for frame in stream:
                    if frame.startswith(_ERROR_STARTS):
                        raise from_payload(_error_of(frame), fields)
                    yield frame
        except Exception as error:
            # The boundary to vLLM, as in `handle`.
            raise self._translated(error, fields) from error

    def _translated(self, error: Exception, fields: JsonObject) -> ServerError:
        ours = from_exception(error, fields)
        if isinstance(ours, InternalError) and self._engine.errored:
            # vLLM reports a dead engine as a fault of each request that met it.
            return engine_failed()
        return ours


_ERROR_STARTS = ('data: {"error"', "event: error")


def _error_of(frame: str) -> JsonObject:
    """Return vLLM's error object of an SSE frame, in the OpenAI form."""
    error: JsonObject = json.loads(frame.partition("data: ")[2])["error"]
    # Anthropic's events carry no status; vLLM sends them for faults only.
    return {"code": 500, "param": None, **error}


async def _named(events: AsyncIterator[BaseModel]) -> AsyncGenerator[str, None]:
    """Turn the Responses API's event objects into SSE frames."""
    async for event in events:
        data = event.model_dump_json(by_alias=True)
        yield f"event: {getattr(event, 'type', 'unknown')}\ndata: {data}\n\n"


def _handlers(state: State) -> dict[str, _Handler]:
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    # A model that does not generate has none of these.
    chat = getattr(state, "openai_serving_chat", None)
    completion = getattr(state, "openai_serving_completion", None)
    responses = getattr(state, "openai_serving_responses", None)
    messages = getattr(state, "anthropic_serving_messages", None)
    tokens = state.serving_tokenization
    return {
        "chat": _Handler(ChatCompletionRequest, chat and chat.create_chat_completion),
        "completion": _Handler(CompletionRequest, completion and completion.create_completion),
        "responses": _Handler(
            ResponsesRequest, responses and responses.create_responses, by_alias=True
        ),
        "messages": _Handler(
            AnthropicMessagesRequest, messages and messages.create_messages, exclude_none=True
        ),
        "count_tokens": _Handler(
            AnthropicCountTokensRequest, messages and messages.count_tokens, exclude_none=True
        ),
        "tokenize": _Handler(TokenizeCompletionRequest, tokens.create_tokenize),
        "tokenize_chat": _Handler(TokenizeChatRequest, tokens.create_tokenize),
        "detokenize": _Handler(DetokenizeRequest, tokens.create_detokenize),
    }


def _pooling_handlers(state: State) -> dict[str, _Handler]:
    from vllm.entrypoints.pooling.classify import protocol as classify
    from vllm.entrypoints.pooling.embed import protocol as embed
    from vllm.entrypoints.pooling.pooling import protocol as pooling
    from vllm.entrypoints.pooling.scoring import protocol as scoring

    # A model that generates has none of these, and one that pools has those of its task.
    forms: dict[str, dict[str, type[BaseModel]]] = {
        "serving_embedding": {
            "embeddings": embed.EmbeddingCompletionRequest,
            "embeddings_chat": embed.EmbeddingChatRequest,
            "embeddings_chats": embed.EmbeddingBatchChatRequest,
            "embeddings_chat_input": embed.EmbeddingChatInputRequest,
            "embeddings_chats_input": embed.EmbeddingBatchChatInputRequest,
            "cohere_embed": embed.CohereEmbedRequest,
        },
        "serving_pooling": {
            "pooling": pooling.PoolingCompletionRequest,
            "pooling_chat": pooling.PoolingChatRequest,
        },
        "serving_classification": {
            "classify": classify.ClassificationCompletionRequest,
            "classify_chat": classify.ClassificationChatRequest,
        },
        "serving_scores": {
            "score": scoring.ScoreQueriesDocumentsRequest,
            "score_items": scoring.ScoreQueriesItemsRequest,
            "score_data": scoring.ScoreDataRequest,
            "score_text": scoring.ScoreTextRequest,
            "rerank": scoring.RerankRequest,
        },
    }
    return {
        form: _Handler(model, getattr(state, serving, None))
        for serving, models in forms.items()
        for form, model in models.items()
    }


def _in_words(tasks: tuple[SupportedTask, ...], model: ModelConfig) -> str:
    """What the model does, for those who ask for something else."""
    if "generate" in tasks:
        return "generates text; one that pools is served with --runner pooling"
    task = model.get_pooling_task(tasks)
    if task in ("classify", "token_classify"):
        return f"pools for the task {task!r} with {model.hf_config.num_labels} labels"
    return f"pools for the task {task!r}"


def _dimensions(model: ModelConfig) -> Sequence[int]:
    every = range(1, model.embedding_size + 1)
    return (model.matryoshka_dimensions or every) if model.is_matryoshka else ()
