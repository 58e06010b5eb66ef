"""vLLM's engine client with this server's checks, options and meters, and its LoRA adapters.

vLLM's classes derive grammars from tools, so that the final grammar of a request is known only in
`add_request`. vLLM would validate it on the event loop; here the grammar gate compiles it in
another process, and a schema is replaced by the grammar that it was rewritten to.

A request finds only the adapter that it holds a lease of: between its lease and vLLM's lookup the
name may be removed or reused by another load.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any

from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import GenerationError, MaxQueuedTokensError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from rbln_backend.api.names import NO_TOKEN_LEFT, PROGRESS_ARGS, Target
from server.errors import ContextLengthError, InternalError, ServerError
from server.frontend import LaunchError
from server.host.tasks import in_thread
from server.lora.folder import ServedModel
from server.lora.registry import STATE_FILE, Adapter, AdapterRegistry, StateFile
from server.request.options import Tier
from server.request.record import RequestRecord, record_var
from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    ANY_OBJECT,
    TOOLS,
    Constraint,
    ConstraintKind,
    job_key,
)
from server.structured_outputs.gate import GrammarGate, refusal
from server.vllm.errors import BacklogError, NoTokenLeftError, RequestContext, from_exception
from server.vllm.patches import use_lora_requests, validate_no_grammars
from server.vllm.sampling import (
    bad_word_ids,
    check_logprobs,
    child_seed,
    predicted_tokens,
    prediction_counts,
    set_draft_options,
)

_TAGGED_SCHEMA = '"json_schema": '
"""Text before each schema in a structural tag."""
_REASONING_IN_GRAMMAR = ("mistral",)
"""Parsers that put the reasoning into the grammars of their calls."""
_LONG_PROMPT = 128
"""Tokens of a prompt from which its progress is reported, if it takes more than one step."""
_MAX_SHARES = 4
"""Upper bound of the compile time of the grammar of all tools, in multiples of one schema's: other
requests wait for the same process."""


class EngineClient(AsyncLLM):
    """AsyncLLM that checks, schedules and meters the engine's requests of each HTTP request."""

    grammars: GrammarGate | None = None
    rewrites_tools = False
    """True if no grammar of tools may have a schema that is not rewritten."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        validate_no_grammars(self)
        self._flex: list[RequestState] = []

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request to the engine as AsyncLLM does, in the class of its service tier.

        Raises `ContextLengthError` for a prompt that leaves no room to answer,
        `VLLMValidationError` for too many logprobs, `RateLimitError` for a request beyond the
        tokens of its API key, and what the gate raises.
        """
        record = record_var.get()
        predicted: list[int] = []
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if isinstance(params, SamplingParams):
            most = self.model_config.max_model_len - 1
            if ids is not None and len(ids) > most:
                raise ContextLengthError(
                    f"The prompt has {len(ids)} tokens; at most {most} leave room for an answer."
                )
            if params.logprobs is not None or params.prompt_logprobs is not None:
                check_logprobs(params, prompt, self.model_config.get_vocab_size())
            if params.bad_words:
                tokenizer = self.renderer.tokenizer
                params._bad_words_token_ids = bad_word_ids(params.bad_words, tokenizer)
                # vLLM has no ids for a word of white space alone, and refuses it.
                params.bad_words = []
            if self.grammars is not None and params.structured_outputs is not None:
                await self._replace_grammar(params, self.grammars, record)
                # A constraint binds behind the reasoning, by the prompt, or at once without one.
                # vLLM has it bind at once where reasoning is hidden, and never in a completion,
                # which has no parser.
                name = self.vllm_config.structured_outputs_config.reasoning_parser
                if name and kwargs.get("reasoning_parser_kwargs") is None:
                    kwargs["reasoning_ended"] = True
                elif name and name not in _REASONING_IN_GRAMMAR:
                    kwargs["reasoning_ended"] = None
            if self.vllm_config.speculative_config is not None:
                text = "" if record is None else record.drafts.prediction
                predicted = await predicted_tokens(self, text)
                set_draft_options(params, record, prompt, predicted)
        if record is None:
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        length = 0 if ids is None else len(ids)
        if record.key_use is not None and not record.has_beams:
            # An answer without a bound counts no tokens.
            bounds_answer = record.bounds_answer and isinstance(params, SamplingParams)
            answer = (params.max_tokens or 0) * params.n if bounds_answer else 0
            record.reserve(length + answer)
        if (
            record.progress is not None
            and isinstance(params, SamplingParams)
            and length >= _LONG_PROMPT
        ):
            # The scheduler reports the progress of the prompt.
            record.progress.is_expected = True
            params.extra_args = {**(params.extra_args or {}), PROGRESS_ARGS: True}
        if record.trace_headers is not None:
            kwargs["trace_headers"] = record.trace_headers
        if record.tier is not None and record.tier.engine_priority is not None:
            kwargs["priority"] = record.tier.engine_priority
        collector = await super().add_request(request_id, prompt, params, *args, **kwargs)
        # The states of the request just added: one for each of its answers. Requests of other
        # clients may have the same id, but none has the same collector.
        processor = self.output_processor
        known = map(processor.request_states.get, processor.external_req_ids[request_id])
        states = [state for state in known if state is not None and state.queue is collector]
        # Counts of tokens, which are read once the HTTP request ends.
        if record.tier is Tier.FLEX:
            self._flex += states
        if not record.has_beams:
            record.tokens.used.append(lambda: _used_tokens(states))
        record.tokens.prefix = lambda: (
            (states[0].num_cached_tokens, states[0].num_cache_creation_tokens) if states else (0, 0)
        )
        if predicted:
            record.tokens.prediction = lambda: prediction_counts(predicted, states)
        return collector

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        params = request.sampling_params
        if params is not None and parent_req is not None and params.seed is not None:
            assert parent_req.sampling_params.seed is not None
            params.seed = child_seed(parent_req.sampling_params.seed, index)
        await super()._add_request(request, prompt, parent_req, index, queue)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Generate as AsyncLLM does; raises `GenerationError` for an output that is an error.

        vLLM's streams check for it only after their first frame, when the status is sent.
        """
        async with aclosing(super().generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                for answer in output.outputs:
                    if answer.finish_reason == "error":
                        is_empty = answer.stop_reason == NO_TOKEN_LEFT
                        raise NoTokenLeftError if is_empty else GenerationError
                yield output

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool as AsyncLLM does. Raises `InternalError` for a result that is not finite.

        JSON has no NaN: vLLM's answer would be a client's error, or NaN in base64.
        """
        async with aclosing(super().encode(*args, **kwargs)) as outputs:
            async for output in outputs:
                # The self-test of a start has no record: one prompt says little of others.
                if record_var.get() is not None and not output.outputs.data.isfinite().all():
                    raise InternalError("The model's result has values that are not finite (NaN).")
                yield output

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Reject a request beyond a limit as AsyncLLM does; `BacklogError` has the numbers."""
        try:
            super().check_admission(n, request_id)
        except MaxQueuedTokensError as error:
            limit = self.scheduler_config.max_num_queued_tokens
            raise BacklogError(self.get_num_queued_tokens(), limit) from error

    def get_num_queued_tokens(self) -> int:
        """Return the waiting prompt tokens of the request's class: flex, or all others."""
        self._flex = [state for state in self._flex if state.is_prefilling]
        flex_tokens = sum(state.prompt_len for state in self._flex)
        record = record_var.get()
        if record is not None and record.tier is Tier.FLEX:
            return flex_tokens
        return super().get_num_queued_tokens() - flex_tokens

    async def _replace_grammar(
        self, params: SamplingParams, grammars: GrammarGate, record: RequestRecord | None
    ) -> None:
        """Replace a schema by its grammar; the gate compiles constraints without a verdict yet."""
        assert params.structured_outputs is not None
        option, text = get_structured_output_key(params.structured_outputs)
        if option is StructuredOutputOptions.JSON_OBJECT:
            kind, text = ConstraintKind.JSON, ANY_OBJECT
        else:
            kind = ConstraintKind[option.name]
            if record is not None:
                record.guided_by(TOOLS)
        # vLLM puts the schemas of all tools that may be called into one grammar.
        shares = min(max(1, text.count(_TAGGED_SCHEMA)), _MAX_SHARES)
        job = [Constraint(kind, text, "tools", exact=False, derived=True, shares=shares)]
        known = {} if record is None else record.grammars
        try:
            key = job_key(job)
            grammar = known[key] if key in known else await grammars.check_job(job)
        except ServerError as error:
            if record is not None:
                record.failure = error
            raise
        if grammar is None and self.rewrites_tools and record is not None and record.guide == TOOLS:
            # The schemas were checked by other rules.
            raise refusal(job[0], "its form has no rewriting")
        if grammar is not None:
            params.structured_outputs = StructuredOutputsParams(grammar=grammar)


def _used_tokens(states: list[RequestState]) -> tuple[int, int]:
    """Return prompt and completion tokens; the answers of one request share their prompt.

    A prompt counts once the engine has read it, as in the engine's metrics.
    """
    completion = sum(
        state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None
    )
    prompts = [state.prompt_len for state in states if not state.is_prefilling]
    return max(prompts, default=0), completion


logger = logging.getLogger(__name__)

_leased: ContextVar[Adapter | None] = ContextVar("leased", default=None)
"""The adapter that the current request holds a lease of."""


def lease(adapters: AdapterRegistry, name: str, record: RequestRecord) -> bool:
    """Lease an adapter to a request until it ends; return False if none is ready."""
    adapter = adapters.lease(name)
    if adapter is None:
        return False
    record.on_end.append(partial(adapters.release, adapter))
    _leased.set(adapter)
    return True


class EngineAdapters:
    """`server.lora.registry.AdapterPort` over the engine and its workers."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def targets(self) -> Mapping[str, Target]:
        """Return the layers that adapters may change; all workers have the same."""
        targets = await self._workers("lora_targets")
        return {name: Target.from_lists(*target) for name, target in targets[0].items()}

    async def stage(self, adapter: Adapter) -> None:
        await self._workers("stage_lora", _request(adapter))

    async def staged(self, adapter_id: int) -> tuple[str, str]:
        """Return the state of the slowest worker, and its message."""
        states = [tuple(state) for state in await self._workers("staged_lora", adapter_id)]
        for stage in ("failed", "reading"):
            for state, message in states:
                if state == stage:
                    return state, message
        return "ready", ""

    async def add(self, adapter: Adapter) -> None:
        await self._call(self._engine.add_lora(_request(adapter)))

    async def remove(self, adapter_id: int) -> None:
        await self._call(self._engine.remove_lora(adapter_id))

    async def slots(self) -> Mapping[int, int]:
        return {int(k): int(v) for k, v in (await self._workers("lora_slots"))[0].items()}

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = await self._call(self._engine.collective_rpc(method, args=arguments))
        return results

    async def _call(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception as error:
            # The boundary to the engine, which raises exceptions of its own.
            raise from_exception(error, RequestContext({}, None)) from error


def _request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.id, adapter.path)


class LeasedNames(Mapping[str, LoRARequest]):
    """Replaces `lora_requests` of vLLM's models: maps names to LoRA requests of the engine."""

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters

    def __getitem__(self, name: str) -> LoRARequest:
        """Return the adapter that the current request holds a lease of, if that is its name."""
        adapter = _leased.get()
        if adapter is None or adapter.name != name:
            raise KeyError(name)
        return _request(adapter)

    def __iter__(self) -> Iterator[str]:
        return (adapter.name for adapter in self._adapters.ready())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def values(self) -> Any:
        """Return the ready adapters as LoRA requests, for vLLM's list of models."""
        return [_request(adapter) for adapter in self._adapters.ready()]


async def open_adapters(
    engine: AsyncLLM,
    models: OpenAIServingModels,
    static: Sequence[LoRAModulePath] | None,
    settings: ServerSettings,
) -> AdapterRegistry | None:
    """Return the registry with the command line's adapters and those before a restart.

    It replaces the adapters of vLLM's `models`. None without --enable-lora. Raises
    `LaunchError` for an adapter of the command line that cannot be loaded.
    """
    config = engine.vllm_config.lora_config
    if config is None:
        return None
    port = EngineAdapters(engine)
    served = [path.name for path in models.base_model_paths]
    names = [engine.model_config.model, *served, *settings.lora_base_names]
    base = ServedModel.of(names, await port.targets(), config.max_lora_rank)
    adapters = AdapterRegistry(
        port,
        base,
        reserved_names=frozenset(served),
        max_loras=config.max_loras,
        root=settings.lora_root,
        state_file=await in_thread(partial(_state_file, settings)),
    )
    for module in static or ():
        if module.is_3d_lora_weight:
            raise LaunchError(
                f"--lora-modules {module.name}: is_3d_lora_weight is not taken: the file's shapes "
                "tell whether its experts are stacked; drop it"
            )
        named = module.base_model_name
        if named is not None and named not in adapters.reserved_names:
            raise LaunchError(
                f"--lora-modules {module.name}: base_model_name is {named!r}, and the served model "
                f"is {' or '.join(map(repr, sorted(adapters.reserved_names)))}"
            )
        try:
            await adapters.load_static(module.name, module.path, named)
        except ServerError as error:
            raise LaunchError(f"--lora-modules {module.name}: {error.message}") from error
    await adapters.restore()
    use_lora_requests(models, LeasedNames(adapters))
    return adapters


def _state_file(settings: ServerSettings) -> StateFile | None:
    if settings.lora_root is None:
        return None
    path = settings.lora_state_file
    file = StateFile(path or settings.lora_root / STATE_FILE)
    if file.writable():
        return file
    if path is not None:
        raise LaunchError(f"--lora-state-file: {str(path)!r} cannot be written")
    logger.warning(
        "%s cannot be written: adapters that are loaded over HTTP are forgotten at a restart; "
        "--lora-state-file names another place",
        file.path,
    )
    return None
