"""Every name of vLLM that the server replaces at run time, and why.

The first column has the name's module, or the vLLM class through which our code reaches it; a test
compares it with all assignments in our sources. Fields of one request's parameters and results,
which `engine_client` and `logprobs` write, are listed, too. `check_shapes` compares the names with
those of the vLLM that they are for (`VERSION`) at each start.

| target | replacement | symptom without it | why it is safe | delete when |
|---|---|---|---|---|
| `vllm.entrypoints.openai.chat_completion.serving.DeltaMessage`, `vllm.entrypoints.openai.chat_completion.serving.ChatCompletionResponseStreamChoice`, `vllm.entrypoints.openai.chat_completion.serving.ChatCompletionStreamResponse`, `vllm.entrypoints.openai.completion.serving.CompletionResponseStreamChoice`, `vllm.entrypoints.openai.completion.serving.CompletionStreamResponse` | `server/vllm/text_stream.py`, API process only | two or three validated models per token, serialised: most of what vLLM's serving class costs | only chunks of plain text are made differently, to the same bytes (`tests/server/vllm/test_streams.py`); all others are vLLM's models | vLLM builds such chunks cheaply |
| row VLLM_WORKER_MULTIPROC_METHOD of `vllm.envs.environment_variables` | `server/vllm/patches.py`, API process only | the table refuses ``forkserver``, which vLLM's own launcher uses | the row is a getter; only the start method of the engine process is read through it | the table accepts ``forkserver`` |
| `vllm.v1.engine.async_llm.renderer_from_config`, `vllm.v1.engine.async_llm.EngineCoreClient` | `server/engine/process.py`, API process only, while AsyncLLM is made | the engine process starts after the tokenizer is loaded, 1.9 s for 128,256 tokens | vLLM's own functions are called with the arguments that it gives, in the other order; other arguments fail the start | vLLM starts the engine first |
| row VLLM_MAX_STOP_STRINGS of `vllm.envs.environment_variables` | `server/vllm/patches.py`, API process and the one that reads bodies | vLLM's request models refuse more than 4 ``stop`` strings whatever ``--max-stop`` allows | the row is a getter, read as those models are made | vLLM takes the limit from a flag |
| `vllm.v1.engine.async_llm.AsyncLLM.output_processor` | `server/engine/outputs.py`, API process only | a request that waited too long looks like a fault of the server, and such a pooling request ends vLLM's output handler | it is a subclass that ends those requests first and leaves the rest to vLLM | vLLM's errors of a request carry a reason |
| `vllm.v1.engine.async_llm.AsyncLLM.logger_manager.__class__` | `server/engine/outputs.py`, API process only | each step is recorded on its own, with cold caches: 13 % of what a token of a single stream costs here | it is a subclass that hands the same steps on in their order, at most 0.1 seconds later, and at once where a request starts or ends | vLLM records steps off the event loop |
| `vllm.v1.engine.core_client.BackgroundResources.output_socket` | `server/engine/socket.py`, API process only | pyzmq makes a future and a second turn of the event loop of every message: 30 % of what a token of a single stream costs here | it is a socket of pyzmq's own class over the same one, in place before anything is received | vLLM's client receives without pyzmq's asyncio machinery |
| `vllm.v1.engine.core_client.AsyncMPClient.outputs_queue` | `server/engine/socket.py`, API process only | asyncio's queue makes a dozen calls per message between the client's two tasks | it is a subclass with the same order, in place before anything is received; one task reads | vLLM's client has one task |
| `vllm.v1.engine.coordinator.DPCoordinatorProc`, `vllm.v1.engine.coordinator.MsgpackDecoder` | `server/engine/coordinator.py`, API process and the coordinator's own | a message of a stranger to the coordinator's port, which listens on the network, ends the coordinator and with it the deployment | subclasses that call vLLM's own; a message that no engine can have sent is read as one without content | vLLM's coordinator skips messages that it cannot decode |
| `vllm.entrypoints.generate.base.protocol.validate_structural_tag_payload` | `server/vllm/engine_client.py`, API process only | vLLM's request models parse structural tags on the event loop, for as long as that takes | the gate has compiled the same tag in a process of its own before, and ``EngineClient`` tries whatever reaches the engine | the models leave it to the engine |
| `vllm.v1.engine.async_llm.AsyncLLM.input_processor.structured_outputs_config` is None | `server/vllm/engine_client.py`, API process only | vLLM validates every grammar on the event loop | as above; ``PinnedXgrammar`` does what the validation rewrote (choices, Lark) | vLLM validates in a thread |
| `vllm.sampling_params.SamplingParams.structured_outputs` | `server/vllm/engine_client.py`, API process only | the engine compiles a schema of its own, which is not the one that was tried | the grammar that the gate made of the same schema takes its place, before the engine sees the request | vLLM asks a backend for the form in which a constraint is handed on |
| `vllm.entrypoints.openai.models.serving.OpenAIServingModels.lora_requests` | `server/vllm/engine_client.py`, API process only | a name could go to another load of an adapter between a request's lease and vLLM's lookup | it is a mapping of names to the same objects, over the registry of adapters | vLLM asks a resolver for each request |
| `__class__` of copies of vLLM's serving instances | `server/vllm/serving.py`, `server/vllm/responses.py`, `server/vllm/messages.py`, API process only | an error of a stream is written into a frame, which hides its reason; a request of Anthropic's API is converted to a chat and validated a second time, on the event loop, and its stream once more for every token | the copies alone are of the subclasses, which raise what they would write, take requests that were converted before and make messages of chats | vLLM lets errors of a stream out as exceptions, and the conversion is a step of its own |
| `parser_cls`, `parser` of copies of vLLM's serving instances and of their `OnlineRenderer` | `server/vllm/parser.py`, API process only | a forced call of a tool that is not `strict` has any JSON for arguments, as has what merely looks like a call | the copies alone have them; a subclass of vLLM's parser, which lends it the tools' schemas while it makes the grammar and looks at calls as they come out | vLLM and xgrammar guide every forced call by its schema |
| `_apply_chat_template_async` of vLLM's renderer, `__class__` of its tokenizer | `server/vllm/rendering.py`, API process only | a chat template runs for as long, and in as much memory, as it takes, in the only thread that renders; text of a message becomes control tokens | the tokenizer is of a subclass whose `apply_chat_template` hands large conversations, and templates whose loops have no known bound, to the process that reads large bodies, with the same arguments, and calls vLLM's own for all others; its `__call__` encodes only prompts with such text differently | vLLM bounds what a template takes, and has transformers' `sanitize_control_tokens` |
| `vllm.renderers.params.TokenizeParams.get_encode_kwargs` | `server/vllm/patches.py`, API process only | prompts are cut one token behind the context, and errors name that length instead of theirs | texts are bounded before; whatever is too long is refused a moment later, as before | vLLM's error counts the whole prompt |
| `vllm.renderers.params.TokenizeParams.get_encode_kwargs` again, `__class__` of the tokenizer of a pooling model | `server/vllm/patches.py`, API process only | with a `truncation_side`, vLLM takes the first or last tokens of all: a separator or the query of a pair is lost | the tokenizer's own encoding is cut between its special tokens, only for requests with a side (`tests/server/vllm/test_prompts.py`) | vLLM hands the side to the tokenizer |
| `vllm.v1.engine.output_processor.RequestState.__class__` | `server/vllm/text_stream.py`, API process only | each token of a stream wakes the stream's task and passes all generators: more than half of what a token costs here | only states of streams whose outputs are texts alone are of the subclass, which makes vLLM's output of all that it does not push (`tests/server/vllm/test_direct_frames.py`) | vLLM's output processor takes a consumer of texts |
| `vllm.v1.engine.detokenizer.FastIncrementalDetokenizer.stream` | `server/engine/outputs.py`, API process only | an answer whose prompt ends in U+FFFD begins with the text of the whole prompt | the stream of the same library, primed with the open character alone; only for such prompts | `DecodeStream` finds the prefix of such ids |
| `vllm.v1.engine.EngineCoreRequest.sampling_params.seed` | `server/vllm/engine_client.py`, API process only | the second answer of a seed is drawn like the first one of the next seed, and one that gets seed -1 is not repeatable | the field of the parameters that vLLM has copied for this one answer | vLLM makes seeds of answers that no request shares |
| `vllm.v1.engine.output_processor.RequestState.logprobs_processor` | `server/engine/outputs.py`, API process only | logprobs of a prompt are returned with one output of a stream, and lost where that is merged into a queued output of another choice; a part of a character has an empty text, and no place in the answer is known | it is a subclass of vLLM's with the same state, whose outputs all have the prompt's, and whose entries of sampled tokens have their bytes and their place | vLLM keeps them when outputs are merged, and has bytes and offsets of tokens |
| `vllm.v1.engine.detokenizer.FastIncrementalDetokenizer.decode_next` | `server/vllm/logprobs.py`, API process only | offsets of tokens in the text are guessed from the texts of tokens, also of those that the text lacks | it notes the length of the text and calls vLLM's own; only for requests with logprobs | the detokenizer has the offsets |
| `vllm.outputs.CompletionOutput.logprobs` | `server/vllm/logprobs.py`, API process only | tokens of beams have no bytes and no place in the answer | entries of the same ranks and values, for one finished result that nothing else reads | beams come out of vLLM's output processor |
| `vllm.v1.engine.logprobs.convert_ids_list_to_tokens` | `server/vllm/logprobs.py`, API process only | each of the tokens with log-probabilities is decoded again in each step, a third of what such a token costs in the HTTP process | it calls vLLM's function for tokens that it has not had, and writes bytes that are no text as OpenAI does; each text depends on its token alone (`tests/server/vllm/test_streams.py`) | vLLM keeps the texts |
| rows of _PROCESSOR_CHAT_TEMPLATES in vLLM's renderer of Hugging Face templates | `server/vllm/patches.py`, API process only | vLLM imports transformers' models and loads the tokenizer again to learn that a text model has no processor | None is what vLLM would store: the checkpoint has no file and no field of a processor | vLLM looks for the files first |
"""  # noqa: E501

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rbln_backend.host.resources import vllm_build
from server.frontend import LaunchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import ModelConfig
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.request import LoRARequest
    from vllm.renderers.params import TokenizeParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

VERSION = "0.30.0"
"""The vLLM that the replacements are for."""

SHAPES: Mapping[str, str] = {
    "vllm.envs.environment_variables": "dict",
    "vllm.renderers.registry.renderer_from_config": "config, kwargs",
    "vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client": (
        "vllm_config, executor_class, log_stats, client_addresses, client_count, client_index, "
        "renderer"
    ),
    "vllm.v1.engine.coordinator.DPCoordinatorProc.run_coordinator": (
        "engine_count, front_publish_address, back_output_address, back_publish_address, "
        "zmq_addr_pipe, min_stats_update_interval_ms, enable_wave_coordination"
    ),
    "vllm.v1.serial_utils.MsgpackDecoder.decode": "self, bufs",
    "vllm.entrypoints.generate.base.protocol.validate_structural_tag_payload": "payload, parameter",
    "vllm.entrypoints.generate.base.protocol.DeltaMessage": (
        "role, content, reasoning, tool_calls, extra_data"
    ),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionResponseStreamChoice": (
        "index, delta, logprobs, finish_reason, stop_reason, token_ids, extra_data"
    ),
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionStreamResponse": (
        "id, object, created, model, choices, usage, system_fingerprint, prompt_token_ids, "
        "prompt_text, metrics, extra_data"
    ),
    "vllm.entrypoints.openai.completion.protocol.CompletionResponseStreamChoice": (
        "index, text, logprobs, finish_reason, stop_reason, prompt_token_ids, token_ids, extra_data"
    ),
    "vllm.entrypoints.openai.completion.protocol.CompletionStreamResponse": (
        "id, object, created, model, choices, usage, system_fingerprint, metrics, extra_data"
    ),
    "vllm.renderers.params.TokenizeParams.get_encode_kwargs": "self",
    "vllm.v1.engine.logprobs.convert_ids_list_to_tokens": "tokenizer, token_ids",
    "vllm.renderers.hf._PROCESSOR_CHAT_TEMPLATES": "dict",
    "vllm.renderers.hf.safe_apply_chat_template": (
        "model_config, tokenizer, conversation, tools, chat_template, tokenize, "
        "return_assistant_tokens_mask, kwargs"
    ),
    "vllm.v1.engine.output_processor.OutputProcessor.process_outputs": (
        "self, engine_core_outputs, engine_core_timestamp, iteration_stats"
    ),
    "vllm.v1.engine.output_processor.RequestState.make_request_output": (
        "self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, "
        "ec_transfer_params"
    ),
    "vllm.v1.metrics.loggers.StatLoggerManager.record": (
        "self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx"
    ),
    "vllm.v1.engine.detokenizer.FastIncrementalDetokenizer.decode_next": "self, next_token_id",
    "vllm.v1.engine.logprobs.LogprobsProcessor.update_from_output": "self, output",
    "vllm.v1.engine.logprobs.LogprobsProcessor.pop_prompt_logprobs": "self",
}
"""What is replaced, or called in place of it: names of arguments and fields, or a type's name."""

_Serving = TypeVar("_Serving")


def check_shapes(*modules: str) -> None:
    """Raise `LaunchError` if a name of vLLM is not what its replacement was written for.

    Only names that begin with one of `modules`, if there are any.
    """
    for name, shape in SHAPES.items():
        if not modules or name.startswith(modules):
            require(_shape(name) == shape, name)


def require(fits: bool, name: str) -> None:
    """Raise `LaunchError` unless a name of vLLM `fits` its replacement."""
    if not fits:
        raise LaunchError(
            f"vLLM {vllm_build().version} has another {name} than the one that this server "
            f"replaces; install vLLM {VERSION}"
        )


def _shape(name: str) -> str | None:
    """Return the shape of a name of vLLM; None if there is no such name."""
    parts = name.split(".")
    # Classes begin with a capital letter; all before is the module, or one name in it.
    last = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    try:
        target: Any = importlib.import_module(".".join(parts[:last]))
        for part in parts[last:]:
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return None
    if str(getattr(target, "__module__", "")).startswith("server."):
        # An earlier start of this process has replaced it.
        return SHAPES[name]
    return (
        ", ".join(inspect.signature(target).parameters)
        if callable(target)
        else type(target).__name__
    )


# Tables of variables, before vLLM's modules read them.


def allow_stop_strings(number: int) -> None:
    """Set vLLM's limit of `stop` strings to this server's.

    vLLM's request models take their limit from its table of variables as they are imported.
    """
    from vllm import envs

    envs.environment_variables["VLLM_MAX_STOP_STRINGS"] = lambda: number


def choose_start_method(method: str) -> None:
    """Make vLLM start its engine process by `method`, `forkserver` or `spawn`.

    Engine processes that start workers still follow the variable.
    """
    from vllm import envs

    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: method


# The start of the engine.


@contextmanager
def engine_parts(make_renderer: Any, client_type: Any) -> Iterator[None]:
    """Have AsyncLLM make its renderer and its client by others while the block runs."""
    from vllm.v1.engine import async_llm

    # What the module has imported, to type checkers not its own.
    module: Any = async_llm
    before = module.renderer_from_config, module.EngineCoreClient
    async_llm.renderer_from_config = make_renderer  # type: ignore[attr-defined]
    async_llm.EngineCoreClient = client_type  # type: ignore[attr-defined]
    try:
        yield
    finally:
        async_llm.renderer_from_config, async_llm.EngineCoreClient = before  # type: ignore[attr-defined]


def use_coordinator(coordinator_type: Any) -> None:
    """Start data-parallel coordinators of this class."""
    from vllm.v1.engine import coordinator

    coordinator.DPCoordinatorProc = coordinator_type  # type: ignore[misc]


def decode_in_coordinator(decoder_type: Any) -> None:
    """Decode the messages to the coordinator of this process by this class."""
    from vllm.v1.engine import coordinator

    coordinator.MsgpackDecoder = decoder_type  # type: ignore[attr-defined]


# Parts of a new engine, before its first request.


def validate_no_grammars(engine: AsyncLLM) -> None:
    """Keep a new engine's client from validating grammars on the event loop."""
    require(hasattr(engine.input_processor, "structured_outputs_config"), "InputProcessor")
    engine.input_processor.structured_outputs_config = None  # type: ignore[assignment]


def use_output_processor(engine: AsyncLLM, processor: OutputProcessor) -> None:
    is_new = engine.output_handler is None and isinstance(processor, type(engine.output_processor))
    require(is_new, "AsyncLLM.output_processor")
    engine.output_processor = processor


def use_stat_loggers(engine: AsyncLLM, manager_type: Any) -> Any:
    """Make a new engine's manager of loggers one of this subclass; None without statistics."""
    manager: Any = engine.logger_manager
    if manager is not None:
        require(issubclass(manager_type, type(manager)), "AsyncLLM.logger_manager")
        engine.logger_manager.__class__ = manager_type
    return manager


def use_output_socket(engine: AsyncLLM, socket: Any, queue: Any) -> None:
    """Replace the output socket and queue of a new engine's client."""
    client: AsyncMPClient = engine.engine_core
    resources: BackgroundResources = client.resources
    is_new = resources.output_queue_task is None and isinstance(queue, type(client.outputs_queue))
    require(is_new, "AsyncMPClient.outputs_queue")
    resources.output_socket = socket
    client.outputs_queue = queue


def use_lora_requests(models: OpenAIServingModels, requests: Mapping[str, LoRARequest]) -> None:
    """Replace the adapters of vLLM's models."""
    require(models.lora_requests == {}, "OpenAIServingModels.lora_requests")
    models.lora_requests = requests  # type: ignore[assignment]  # a dict to read


# Serving classes and their models.


def leave_tags_to_the_gate() -> None:
    """Keep vLLM's request models from parsing structural tags on the event loop; idempotent."""
    from vllm.entrypoints.generate.base import protocol

    protocol.validate_structural_tag_payload = lambda *_, **__: None


def adapt_serving(serving: _Serving, subclass: type, parser_of: Callable[[Any], Any]) -> _Serving:
    """Return a copy of a serving instance that is of the subclass `ours` and has our parser."""
    require(issubclass(subclass, type(serving)), type(serving).__name__)
    adapted: Any = copy.copy(serving)
    adapted.__class__ = subclass
    for name in ("parser_cls", "parser"):
        if hasattr(adapted, name):
            setattr(adapted, name, parser_of(getattr(adapted, name)))
    if hasattr(adapted, "online_renderer"):
        adapted.online_renderer = copy.copy(adapted.online_renderer)
        adapted.online_renderer.parser = parser_of(adapted.online_renderer.parser)
    return cast("_Serving", adapted)


def make_chat_chunks(replace: Callable[..., Sequence[Any]]) -> None:
    """Replace the three models of a chat's stream by what `replace` makes of them; idempotent."""
    from vllm.entrypoints.openai.chat_completion import serving

    module: Any = serving
    models = (
        module.DeltaMessage,
        module.ChatCompletionResponseStreamChoice,
        module.ChatCompletionStreamResponse,
    )
    if isinstance(models[0], type):
        delta, choice, chunk = replace(*models)
        serving.DeltaMessage = delta  # type: ignore[attr-defined]
        serving.ChatCompletionResponseStreamChoice = choice  # type: ignore[attr-defined]
        serving.ChatCompletionStreamResponse = chunk  # type: ignore[attr-defined]


def make_completion_chunks(replace: Callable[..., Sequence[Any]]) -> None:
    """Replace the two models of a completion's stream by what `replace` makes; idempotent."""
    from vllm.entrypoints.openai.completion import serving

    module: Any = serving
    models = module.CompletionResponseStreamChoice, module.CompletionStreamResponse
    if isinstance(models[0], type):
        choice, chunk = replace(*models)
        serving.CompletionResponseStreamChoice = choice  # type: ignore[attr-defined]
        serving.CompletionStreamResponse = chunk  # type: ignore[attr-defined]


# Rendering and tokenizing.

# Files whose fields may name a processor, and the fields.
_CONFIGS = ("config.json", "tokenizer_config.json")
_FIELDS = ("processor_class", "AutoProcessor")


def skip_processor(model_config: ModelConfig, tokenizer: Any) -> None:
    """Record in vLLM that a text model has no processor, whose chat template it would prefer.

    `tokenizer` is the model's, or None if vLLM renders prompts without a template.
    """
    if tokenizer is None or model_config.is_multimodal_model:
        return
    name = str(tokenizer.name_or_path)
    if not has_no_processor(Path(name)):
        return
    from vllm.renderers import hf

    revisions = model_config.revision, model_config.code_revision
    key = (name, *revisions, bool(model_config.trust_remote_code))
    hf._PROCESSOR_CHAT_TEMPLATES.setdefault(key, None)


def has_no_processor(folder: Path) -> bool:
    """Return True for a local checkpoint without files or fields of a processor."""
    if not folder.is_dir() or next(folder.glob("*processor*"), None) is not None:
        return False
    texts = [
        (folder / name).read_text(encoding="utf-8", errors="replace")
        for name in _CONFIGS
        if (folder / name).is_file()
    ]
    return not any(field in text for field in _FIELDS for text in texts)


def use_template_renderer(renderer: Any, tokenizer_type: type, apply: Any) -> None:
    """Have a renderer apply chat templates by `apply`, and its tokenizer be of a subclass."""
    require(hasattr(renderer, "_apply_chat_template_async"), "HfRenderer")
    renderer._apply_chat_template_async = apply
    use_tokenizer_type(renderer.tokenizer, tokenizer_type)


def use_tokenizer_type(tokenizer: PreTrainedTokenizerBase, tokenizer_type: type) -> None:
    """Make a tokenizer one of a subclass of its class."""
    require(issubclass(tokenizer_type, type(tokenizer)), type(tokenizer).__name__)
    tokenizer.__class__ = tokenizer_type


def count_whole_prompts() -> None:
    """Keep vLLM from cutting prompts behind the context's last token; idempotent.

    The tokenizer reads the whole text in either case; the length of texts is checked before. The
    error of a prompt that is too long has its length.
    """
    from vllm.renderers.params import TokenizeParams

    upstream = TokenizeParams.get_encode_kwargs
    if upstream.__name__ == "encode_whole":
        return

    def encode_whole(self: TokenizeParams) -> dict[str, Any]:
        arguments = upstream(self)
        if self.truncate_prompt_tokens is None:
            arguments.pop("max_length", None)
            arguments["truncation"] = False
        return arguments

    TokenizeParams.get_encode_kwargs = encode_whole  # type: ignore[method-assign]


def keep_special_tokens(tokenizer: Any) -> None:
    """Make the tokenizer of a pooling model cut texts on the side that a request names.

    vLLM tokenizes such a text whole and takes the first or last tokens of all, without a separator
    or the query of a pair. The ordinary tokens are cut here, of a pair those of the second text
    first, as transformers does for `only_second` on its own side.
    """
    from transformers import TokenizersBackend
    from vllm.renderers.params import TokenizeParams

    if not isinstance(tokenizer, TokenizersBackend):
        return

    class SideTokenizer(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, truncation_side: str | None = None, **arguments: Any) -> Any:
            """Return the encoding of one text or pair, cut to ``max_length`` on its side."""
            if truncation_side is None:
                return super().__call__(*args, **arguments)
            most = arguments.pop("max_length")
            whole = super().__call__(*args, **{**arguments, "truncation": False})
            indices = kept_tokens(whole.sequence_ids(0), most, truncation_side)
            return {name: [values[index] for index in indices] for name, values in whole.items()}

    use_tokenizer_type(tokenizer, SideTokenizer)
    upstream = TokenizeParams.get_encode_kwargs

    def encode(self: TokenizeParams) -> dict[str, Any]:
        arguments, most, side = upstream(self), self.truncate_prompt_tokens, self.truncation_side
        if most is None or side is None:
            return arguments
        most = self.max_input_tokens if most < 0 else most
        return {**arguments, "truncation": True, "max_length": most, "truncation_side": side}

    TokenizeParams.get_encode_kwargs = encode  # type: ignore[method-assign]


def kept_tokens(sequences: Sequence[int | None], most: int, side: str) -> list[int]:
    """Return the places of the tokens that stay.

    `sequences` has the text of each token, 0 or 1, None for special tokens.
    """
    excess = len(sequences) - most
    cut: set[int] = set()
    for text in (1, 0):
        places = [index for index, one in enumerate(sequences) if one == text]
        count = min(max(excess - len(cut), 0), len(places))
        cut.update(places[:count] if side == "left" else places[len(places) - count :])
    return [index for index in range(len(sequences)) if index not in cut]


# States of requests.


def use_token_texts(texts: Callable[[Any, Sequence[int]], list[str]]) -> None:
    """Make vLLM's log-probabilities take the texts of tokens from `texts`."""
    from vllm.v1.engine import logprobs

    logprobs.convert_ids_list_to_tokens = texts  # type: ignore[assignment, attr-defined]


def use_logprobs_processor(state: RequestState, processor: Any) -> None:
    state.logprobs_processor = processor


def use_request_state(state: RequestState, state_type: type) -> None:
    state.__class__ = state_type


def use_decoder(detokenizer: FastIncrementalDetokenizer, decode_next: Callable[[int], str]) -> None:
    detokenizer.decode_next = decode_next  # type: ignore[method-assign, assignment]


def use_decode_stream(detokenizer: FastIncrementalDetokenizer, stream: Any) -> None:
    detokenizer.stream = stream
