"""Parse and check a request's body: from bytes to one of vLLM's request models.

Small bodies are read on the event loop, large ones in another process, which may be killed. That
process renders the chat templates of large conversations, too. Jobs and answers are pickled: both
ends belong to this service. Invariant: the work is linear in the size of the body, also if
everything in it is invalid.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import pickle
import resource
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator, from_json, to_json
from starlette.datastructures import State
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.tasks import SupportedTask

from rbln_backend import api
from server import bounds
from server.errors import (
    BodyTooLargeError,
    InternalError,
    InvalidValueError,
    OverloadedError,
    ReaderFailedError,
    RequestError,
    ServerError,
    UnsupportedOperationError,
)
from server.frontend import ParsedRequest
from server.host.job_pool import (
    MEMORY_BYTES,
    JobCounts,
    JobCrashedError,
    JobPool,
    JobTimeoutError,
    PoolFullError,
    WorkerStartError,
    limit_growth,
)
from server.observability.logging import bound_vllm_log, configure, request_id_var
from server.request.body import drop_billing_line, normalize_conversation, parse_json_object
from server.request.endpoints import answers_in, request_form
from server.request.options import (
    DRAFT_FIELDS,
    PROGRESS_FIELD,
    TEMPLATE_FIELDS,
    THINKING_FIELDS,
    TIER_FIELD,
    DraftOptions,
    TemplateVariables,
    ThinkingSupport,
    filter_variables,
    normalize_thinking,
    pop_drafts,
    pop_progress,
    pop_tier,
)
from server.request.rules import (
    UnknownPolicy,
    accepted_fields,
    apply_field_rules,
    check_shape,
    get_shapes,
    model_field_names,
    refuse_unknown,
    required_field_names,
    unknown_field,
)
from server.request.sizes import RequestLimits, check_call_arguments, check_sizes
from server.request.tables import content_fields, error_field
from server.request.values import REPORT_MODE, bound_tokens, check_values
from server.settings import ServerSettings
from server.storage.compaction import expand_compactions, summarise, take_trigger
from server.storage.response_table import StorageOptions, shown_request, take_storage_options
from server.structured_outputs.constraint import Constraint, get_constraints
from server.structured_outputs.custom_tools import take_custom_tools
from server.tools import FIELD, TOOL_FIELDS, ToolChoice, ToolSupport, check_choice, check_tools
from server.vllm.errors import RequestContext, from_exception, from_validation
from server.vllm.rendering import MARK, Rendered, render
from server.vllm.sampling import FORBIDDING
from server.vllm.templates import declared_by, template_variables
from server.vllm.tools import allow_names, rewrites_arguments
from server.wire import Endpoint, JsonObject

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """Rules of one server.

     `offered` are the forms that the served model answers; `does` describes its task for errors.
    `guided`: answers may be constrained. `rewrites_tools`: grammars of calls have rewritten
    schemas. `merge_inline_system`: Anthropic's system messages in a conversation are merged.
    `speculates`: the engine verifies drafts. `variables` are those of the model's templates;
    `own_templates`: requests may send a template. `sampling` has the model's default parameters.
    """

    limits: RequestLimits
    unknown_fields: UnknownPolicy
    max_json_depth: int
    merge_inline_system: bool
    thinking: ThinkingSupport
    variables: TemplateVariables
    own_templates: bool
    tools: ToolSupport
    guided: bool
    rewrites_tools: bool
    speculates: bool
    sampling: JsonObject
    offered: frozenset[str]
    does: str


def make_request_rules(
    config: VllmConfig,
    state: State,
    settings: ServerSettings,
    tasks: tuple[SupportedTask, ...],
    offered: frozenset[str],
    tools: ToolSupport,
) -> RequestRules:
    """Return the rules for the forms `offered`; `state` has vLLM's serving classes."""
    model, scheduler = config.model_config, config.scheduler_config
    tokenizer = state.online_renderer.renderer.tokenizer
    missing = frozenset(api.missing_token_ids(tokenizer, model.get_vocab_size()))
    messages = getattr(state, "anthropic_serving_messages", None)
    dimensions = tuple(model.matryoshka_dimensions or ()) or range(1, model.embedding_size + 1)
    vocab_size = next(n for n in range(model.get_vocab_size(), 0, -1) if n - 1 not in missing)
    return RequestRules(
        limits=RequestLimits(
            max_messages=bounds.MAX_MESSAGES,
            max_prompts=bounds.MAX_PROMPTS,
            max_tools=bounds.MAX_TOOLS,
            # More answers than sequences would wait for each other.
            max_n=min(settings.max_n, scheduler.max_num_seqs),
            max_stop=settings.max_stop,
            max_logit_bias=bounds.MAX_LOGIT_BIAS,
            max_model_len=model.max_model_len,
            vocab_size=vocab_size,
            missing_ids=missing,
            max_queued_tokens=scheduler.max_num_queued_tokens,
            has_priorities=scheduler.policy == "priority",
            text_only=not model.is_multimodal_model,
            transfers_kv=config.kv_transfer_config is not None,
            extra_args=_extra_args(config),
            max_logprobs=model.max_logprobs,
            dimensions=dimensions if model.is_matryoshka else (),
        ),
        unknown_fields=settings.unknown_fields,
        max_json_depth=bounds.MAX_JSON_DEPTH,
        merge_inline_system=messages is not None and messages._merge_inline_system,
        thinking=_thinking_support(getattr(state, "openai_serving_chat", None)),
        variables=template_variables(state.online_renderer),
        own_templates=state.online_renderer.trust_request_chat_template,
        tools=tools,
        guided="generate" in tasks,
        rewrites_tools=rewrites_arguments(tools.parser),
        speculates=config.speculative_config is not None,
        sampling=model.get_diff_sampling_param(),
        offered=offered,
        does=_task_in_words(tasks, model),
    )


def _task_in_words(tasks: tuple[SupportedTask, ...], model: ModelConfig) -> str:
    if "generate" in tasks:
        return "generates text; one that pools is served with --runner pooling"
    task = model.get_pooling_task(tasks)
    if task in ("classify", "token_classify"):
        return f"pools for the task {task!r} with {model.hf_config.num_labels} labels"
    return f"pools for the task {task!r}"


def _extra_args(config: VllmConfig) -> frozenset[str] | None:
    """Return the keys of `vllm_xargs` that something reads; None where processors may read any."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    if config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
        return None
    events = config.kv_events_config
    return frozenset((REPORT_MODE,) if events is not None and events.enable_kv_cache_events else ())


def _thinking_support(serving: Any) -> ThinkingSupport:
    """Return what the served model has for thinking; `serving` is vLLM's of chats, if any."""
    if serving is None:
        return ThinkingSupport()
    from vllm.entrypoints.chat_utils import load_chat_template

    parser, tokenizer = serving.parser_cls, serving.renderer.tokenizer
    # The template that the server was started with, a file or itself, or the model's.
    template = load_chat_template(serving.chat_template) or getattr(tokenizer, "chat_template", "")
    return ThinkingSupport.of(
        template if isinstance(template, str) else "",
        parses=parser is not None and parser.reasoning_parser_cls is not None,
        harmony=serving.online_renderer.use_harmony,
    )


class BodyReader:
    def __init__(self, rules: RequestRules, models: Mapping[str, type[BaseModel]]) -> None:
        """`models` are vLLM's request models by form."""
        self._rules = rules
        self._models = models

    def build_validators(self, forms: Iterable[str] = ()) -> None:
        """Build the validators of `forms`, or of all; others are built by their first request."""
        for form in forms or self._models:
            if form in self._rules.offered:
                _fail_fast_validator(self._models[form])

    def read(  # noqa: C901, PLR0912 (the list of all steps, in their order)
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None, *, is_large: bool = False
    ) -> ParsedRequest | StorageOptions:
        """Parse and check a body; see `server.frontend.Frontend.read`.

        Raises the `ServerError` of the first check that fails.
        """
        rules = self._rules
        # JSON, whose depth is bounded before anything walks it.
        body = parse_json_object(raw, rules.max_json_depth)
        # The form decides on vLLM's request model; the served model may not answer it.
        form = request_form(endpoint, body)
        if form not in rules.offered:
            raise UnsupportedOperationError(
                f"{endpoint.value} is not offered: the served model {rules.does}."
            )
        model = self._models[form]
        if form == "rerank" and isinstance(body.get("documents"), list):
            # Cohere's clients also send objects.
            body["documents"] = [
                one["text"] if isinstance(one, dict) and one.keys() == {"text"} else one
                for one in body["documents"]
            ]
        extra_fields: JsonObject = {}
        options: StorageOptions | None = None
        compacts = False
        if endpoint.takes_items:
            if endpoint is Endpoint.RESPONSES:
                # The answer shows what the client sent of the request, so before any change.
                extra_fields = shown_request(body, rules.sampling)
            # The stored conversation goes in front; without it, only the options are known.
            options = take_storage_options(endpoint, body, before)
            if options.previous is not None and before is None:
                return options
            expand_compactions(body)
            compacts = take_trigger(body)
            if compacts:
                # Stored without it, so that the conversation can go on.
                options.items = to_json(from_json(options.items)[:-1])
        # Sizes: after this, all work is linear in what the limits allow.
        check_sizes(endpoint, body, rules.limits)
        check_call_arguments(body, rules.max_json_depth)
        # Fields that vLLM's models do not have leave the body.
        if endpoint.anthropic:
            drop_billing_line(body)
        tier = pop_tier(endpoint, body) if TIER_FIELD in body else None
        returns_progress, ignored = False, list[str]()
        if PROGRESS_FIELD in body:
            returns_progress, ignored = pop_progress(endpoint, body)
        # Custom tools and their calls become functions, and the conversation is checked with these.
        if TOOL_FIELDS & body.keys():
            check_tools(endpoint, body)
        custom_tools = take_custom_tools(
            endpoint,
            body,
            lambda path, known: refuse_unknown(unknown_field(path, known), rules.unknown_fields),
        )
        normalize_conversation(endpoint, body)
        # The documented fields: granted and ignored ones leave, refused ones are errors.
        ignored += apply_field_rules(endpoint, body)
        template, declared = body.get("chat_template"), None
        if rules.own_templates and isinstance(template, str):
            declared = declared_by(template)
        if TEMPLATE_FIELDS & body.keys():
            ignored += filter_variables(
                endpoint, body, rules.variables, rules.unknown_fields, declared
            )
        if compacts or endpoint is Endpoint.COMPACT:
            # After the rules, which are about what the client sent: a request for a summary.
            output = summarise(body, rules.limits.max_model_len)
            if endpoint is Endpoint.COMPACT:
                extra_fields["output"] = output
        # After the variables, which a client may set itself: thinking becomes one of them.
        if THINKING_FIELDS & body.keys():
            ignored += normalize_thinking(endpoint, body, rules.thinking)
        drafts, undrafted = DraftOptions(), list[str]()
        if DRAFT_FIELDS & body.keys():
            drafts, undrafted = pop_drafts(endpoint, body, speculates=rules.speculates)
        known, needed = model_field_names(model), required_field_names(model)
        if "top_n" in known and "top_k" in body:
            # Voyage's name in reranking.
            body.setdefault("top_n", body.pop("top_k"))
        # All other fields are the model's, or unknown.
        fields, unset = accepted_fields(body, known, needed, rules.unknown_fields, endpoint)
        if not fields.get("tools", True):
            # Clients without tools send an empty list, which vLLM's chat model rejects.
            del fields["tools"]
        # Values, before the models, whose errors name other fields, no limit or no field.
        if endpoint.anthropic:
            # In this API an upper bound, which may exceed the context.
            bound_tokens(endpoint, fields, rules.limits)
        check_values(endpoint, fields, rules.limits, rules.sampling)
        if rules.tools.prompt == "none":
            rules.tools.check(endpoint, fields)
        if FIELD in fields:
            check_choice(endpoint, fields)
        constraints: list[list[Constraint]] = []
        name = "structured_outputs"
        if shape := get_shapes(model).get(name):
            unset += check_shape(shape, fields.get(name), name, rules.unknown_fields)
        if rules.guided:
            constraints = get_constraints(endpoint, fields, rewrites_tools=rules.rewrites_tools)
        # vLLM's model last: types, then unknown fields of nested objects.
        others = content_fields(endpoint)
        return ParsedRequest(
            answers=answers_in(endpoint, fields),
            fields={name: value for name, value in fields.items() if name not in others},
            form=form,
            model=self._model(endpoint, form, fields, unset),
            error_field=error_field(endpoint, fields),
            constraints=constraints,
            custom_tools=custom_tools,
            compacts=compacts and endpoint is Endpoint.RESPONSES,
            forbidding=[name for name in FORBIDDING if fields.get(name)],
            ignored=sorted(ignored + undrafted + unset),
            drafts=drafts,
            returns_progress=returns_progress,
            tier=tier,
            extra_fields=extra_fields,
            storage_options=options,
            is_large=is_large,
        )

    def _model(
        self, endpoint: Endpoint, form: str, fields: JsonObject, unset: list[str]
    ) -> BaseModel:
        """Return the request model; for Anthropic's API, vLLM's chat request.

        It has the names of the tools that may be called. `unset` takes the places of unknown fields
        that are null.
        """
        choice = ToolChoice.of(fields[FIELD]) if FIELD in fields else ToolChoice()
        if endpoint.chats and FIELD in fields:
            # vLLM's chat model has no list of tools, and treats null as a choice.
            sent = fields.pop(FIELD)
            fields |= {} if sent is None else {FIELD: choice.mode if choice.listed else sent}
        with self._validation_errors(endpoint, form, fields):
            # JSON's own rules and no coercion: a string is not a number, and true is not 1.
            model: BaseModel = _fail_fast_validator(self._models[form]).validate_json(
                to_json(fields), strict=True
            )
        # Read the content parts of messages, which pydantic validates while they are iterated over.
        # Otherwise the event loop would read them, and they cannot be sent between processes.
        for index, message in enumerate(model.__dict__.get("messages") or ()):
            for name, value in message.items() if isinstance(message, dict) else ():
                if isinstance(value, Iterator):
                    try:
                        message[name] = list(value)
                    except ValidationError as error:
                        value_sent = fields["messages"][index][name]
                        path = f"messages[{index}].{name}"
                        raise from_validation(error, value_sent, path) from None
        for name, shape in get_shapes(self._models[form]).items():
            unset += check_shape(shape, fields.get(name), name, self._rules.unknown_fields)
        if endpoint.anthropic:
            with self._validation_errors(endpoint, form, fields):
                model = as_chat_request(model, merge_inline_system=self._rules.merge_inline_system)
        if choice.listed:
            allow_names(model, choice)
        return model

    @contextmanager
    def _validation_errors(
        self, endpoint: Endpoint, form: str, fields: JsonObject
    ) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise from_validation(error, fields) from None
        except (VLLMValidationError, VLLMClientError) as error:
            raise from_exception(
                error, RequestContext(fields, error_field(endpoint, fields))
            ) from None
        except Exception as error:
            # vLLM's own checks precede those of types and fail on values of other types.
            raise self._refusal(form, fields, error) from error

    def _refusal(self, form: str, fields: JsonObject, error: Exception) -> RequestError:
        try:
            _types_validator(self._models[form]).validate_json(to_json(fields), strict=True)
        except ValidationError as complaint:
            return from_validation(complaint, fields)
        except Exception:
            # Nested models have such checks, too.
            logger.debug("Reported as a client error", exc_info=True)
        logger.debug("Reported as a client error", exc_info=error)
        return InvalidValueError("The request cannot be understood; one of its values is wrong.")


@cache
def _fail_fast_validator(model: type[BaseModel]) -> SchemaValidator:
    """Return a model's validator that stops at the first wrong entry of each list.

    Every branch of a union reports each wrong entry: in the Responses API hundreds of errors per
    entry, and thousands of entries would exceed the memory.
    """
    return SchemaValidator(_fail_fast(model.__pydantic_core_schema__), _use_prebuilt=False)


def _fail_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _fail_fast(value) for key, value in schema.items()}
        if changed.get("type") in ("list", "tuple", "set", "frozenset"):
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_fail_fast(item) for item in schema)
    return schema


@cache
def _types_validator(model: type[BaseModel]) -> SchemaValidator:
    """Return the validator of a model's fields without the model's own checks around them.

    Cached: building one takes 10 ms.
    """
    whole = _fail_fast(model.__pydantic_core_schema__)
    inner = whole["schema"] if whole["type"] == "definitions" else whole
    while inner["type"] != "model-fields":
        inner = inner["schema"]
    schema = {**whole, "schema": inner} if whole["type"] == "definitions" else inner
    return SchemaValidator(schema, _use_prebuilt=False)


def as_chat_request(request: BaseModel, *, merge_inline_system: bool) -> BaseModel:
    """Return a request of Anthropic's API as one for a chat.

    vLLM's conversion validates a request a second time, so it runs here, not on the event loop.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.base.protocol import JsonSchemaResponseFormat, ResponseFormat

    chat = AnthropicServingMessages.to_chat_completion_request(
        request,  # type: ignore[arg-type]  # one of the two that it takes
        merge_inline_system=merge_inline_system,
    )
    config = getattr(request, "output_config", None)
    if config is not None and config.format is not None and config.format.json_schema == {}:
        # vLLM takes an empty schema for none.
        chat.response_format = ResponseFormat(
            type="json_schema", json_schema=JsonSchemaResponseFormat(name="json_schema", schema={})
        )
    if not chat.tools and chat.tool_choice is None:
        # As in a chat. Otherwise vLLM reads the answer as one that may have calls.
        chat.tool_choice = "none"
    last: Any = chat.messages[-1]
    is_text = isinstance(last.get("content"), str) and not last.get("tool_calls")
    if last["role"] == "assistant" and is_text:
        # The conversation ends with the beginning of its answer.
        chat.add_generation_prompt, chat.continue_final_message = False, True
    return chat


SMALL_BYTES = 32 * 1024
SMALL_CONTAINERS = 160
"""Most objects and arrays, brackets in texts included, of a body parsed within milliseconds."""
HUGE_BYTES = 1 << 20
"""Larger bodies take a second or more to parse."""
_SMALL_JOB_BYTES = 4 * SMALL_BYTES
"""Size of a job that renders a small conversation: its template may be longer than the text."""
_MAX_HUGE_WAITING = 8
_RETRY_S = 2.0


def is_small(raw: bytes, before: bytes = b"") -> bool:
    """Return True if a body, with its earlier turns, can be read on the event loop."""
    if len(raw) + len(before) > SMALL_BYTES:
        return False
    return sum(text.count(b"{") + text.count(b"[") for text in (raw, before)) <= SMALL_CONTAINERS


class RequestReader:
    """Reads bodies from one event loop; only small bodies are parsed on it."""

    def __init__(self, here: BodyReader, pool: JobPool) -> None:
        self._here = here
        self._pool = pool
        self._counts = JobCounts()
        self._huge = asyncio.Lock()
        self._huge_waiting = 0

    async def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ParsedRequest | StorageOptions:
        """Parse a body.

        Raises the `ServerError` of the first check that fails, and `OverloadedError` if too many
        large bodies wait or one takes longer than `bounds.READ_TIMEOUT_S`.
        """
        if is_small(raw, before or b""):
            return self._here.read(endpoint, raw, before)
        began = time.perf_counter()
        try:
            async with self._turn(len(raw) + len(before or b"")):
                job = job_bytes(endpoint, raw, before, request_id_var.get())
                parsed: ParsedRequest | StorageOptions = get_answer(
                    await self._exchange(job, "read", self._pool.timeout_s)
                )
        except RequestError:
            self._counts.note("refused", time.perf_counter() - began)
            raise
        self._counts.note("ok", time.perf_counter() - began)
        return parsed

    @asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        """Serialize huge bodies, so that other bodies wait for at most one of them."""
        if size <= HUGE_BYTES:
            yield
            return
        if self._huge_waiting >= _MAX_HUGE_WAITING:
            self._counts.note("overloaded")
            raise _overloaded(f"{self._huge_waiting} requests of megabytes wait to be read.")
        self._huge_waiting += 1
        try:
            async with self._huge:
                yield
        finally:
            self._huge_waiting -= 1

    async def render(self, job: bytes) -> Rendered:
        """Render a chat template over a conversation.

        The request is admitted already, so it waits for a process. Raises a `ServerError` if
        rendering exceeds its limit of time or memory; of time, `InvalidValueError` for a small one.
        """
        small = len(job) <= _SMALL_JOB_BYTES
        limit_s = bounds.RENDER_TIMEOUT_S if small else self._pool.timeout_s
        rendered: Rendered = get_answer(await self._exchange(job, "render", limit_s, waits=True))
        return rendered

    def take_counts(self) -> JobCounts:
        counts, self._counts = self._counts, JobCounts()
        return counts

    async def _exchange(
        self, job: bytes, does: str, limit_s: float, *, waits: bool = False
    ) -> bytes:
        try:
            return await self._pool.run(job, limit_s / self._pool.timeout_s, waits=waits)
        except PoolFullError:
            self._counts.note("overloaded")
            raise _overloaded("Too many large requests wait to be read.") from None
        except JobTimeoutError:
            self._counts.note("timeout", limit_s)
            if limit_s < self._pool.timeout_s:
                raise InvalidValueError(
                    f"The chat template takes longer than {limit_s:g} s to render the conversation."
                ) from None
            raise _overloaded(f"The request took longer than {limit_s:g} s to {does}.") from None
        except JobCrashedError as error:
            self._counts.note("crashed")
            raise ReaderFailedError(
                f"The process that reads large requests was ended {error} before it had {does} "
                "this one.",
                retry_after_s=_RETRY_S,
            ) from None
        except WorkerStartError as error:
            self._counts.note("not_started")
            raise InternalError(f"Large requests cannot be read: {error}.") from None


def _overloaded(message: str) -> OverloadedError:
    return OverloadedError(message, rejection="reading", retry_after_s=_RETRY_S)


_NICENESS = 10
_KEPT_BYTES = 64 << 20
"""Growth of the process beyond which freed memory is returned to the system at once."""


def job_bytes(
    endpoint: Endpoint, raw: bytes, before: bytes | None, request_id: str | None
) -> bytes:
    """Return a job: endpoint, earlier items of the conversation, and body."""
    size = -1 if before is None else len(before)
    return f"{endpoint.name} {size} {request_id or ''}\n".encode() + (before or b"") + raw


def get_answer(data: bytes) -> Any:
    """Return the reply of a job: a parsed body or a rendered prompt.

    Raises the `ServerError` that it holds.
    """
    answer = pickle.loads(data)  # noqa: S301 (written by `serve_reading`, below)
    if isinstance(answer, ServerError):
        raise answer
    return answer


def serve_reading(pipe: Connection, rules: RequestRules, settings: ServerSettings) -> None:
    """Answer jobs until the pipe ends; the first message says that the process is ready."""
    import setproctitle

    setproctitle.setproctitle("rbln-serve: reading requests")
    os.nice(_NICENESS)
    configure(settings.log_level, settings.log_format)
    bound_vllm_log()
    from server.vllm.patches import allow_stop_strings

    allow_stop_strings(settings.max_stop)
    from server.vllm.models import request_models

    reader = BodyReader(rules, request_models())
    reader.build_validators()
    before = _resident_bytes()
    limit_growth()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            pipe.send_bytes(_answer(reader, pipe.recv_bytes()))
            if _resident_bytes() - before > _KEPT_BYTES:
                ctypes.CDLL(None).malloc_trim(0)


def _answer(reader: BodyReader, job: bytes) -> bytes:
    answer: ParsedRequest | StorageOptions | Rendered | ServerError
    try:
        answer = render(job) if job.startswith(MARK) else _read(reader, job)
    except MemoryError:
        answer = BodyTooLargeError(
            f"The request needs more than {MEMORY_BYTES >> 20} MiB of memory to be read."
        )
    except ServerError as error:
        answer = error
    except Exception:
        # The boundary of the process: one request must not end it.
        logger.exception("A request could not be read")
        answer = InternalError("Internal error; the server's log has it under the request id.")
    return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def _read(reader: BodyReader, job: bytes) -> ParsedRequest | StorageOptions:
    head, _, rest = job.partition(b"\n")
    endpoint, size, request_id = head.decode().split(" ", 2)
    before = None if size == "-1" else rest[: int(size)]
    request_id_var.set(request_id or None)
    body = rest[len(before or b"") :]
    return reader.read(Endpoint[endpoint], body, before, is_large=True)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(statm[1]) * resource.getpagesize()
