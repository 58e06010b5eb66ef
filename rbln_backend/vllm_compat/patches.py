"""The patch ledger: every upstream name that this project replaces at run time, and why.

The first column has the name's module, or the vLLM class through which our code reaches it; a test
compares it with all assignments in our sources. Settings, messages from scheduler to workers and
the runner's tables are meant to be written, and not listed.

| target | where | symptom without it | why it is safe | delete when |
|---|---|---|---|---|
| `torch.accelerator.empty_cache`, `torch.accelerator.empty_host_cache` | `apply_patches`, engine and worker processes | vLLM 0.30's ``cleanup_dist_env_and_memory`` calls them for every platform but its own CPU one; torch raises without an accelerator, so each clean shutdown logs a traceback | without an accelerator there is no cache to empty | vLLM asks the platform, or torch makes them no-ops |
| `vllm.entrypoints.openai.chat_completion.serving.DeltaMessage`, `vllm.entrypoints.openai.chat_completion.serving.ChatCompletionResponseStreamChoice`, `vllm.entrypoints.openai.chat_completion.serving.ChatCompletionStreamResponse`, `vllm.entrypoints.openai.completion.serving.CompletionResponseStreamChoice`, `vllm.entrypoints.openai.completion.serving.CompletionStreamResponse` | `server/vllm/streams/text_chunks.py`, API process only | two or three validated models per token, serialised: most of what vLLM's serving class costs | only chunks of plain text are made differently, to the same bytes (`tests/server/vllm/test_stream_chunks.py`); all others are vLLM's models | vLLM builds such chunks cheaply |
| row VLLM_WORKER_MULTIPROC_METHOD of `vllm.envs.environment_variables` | `server/engine/process.py`, API process only | the table refuses ``forkserver``, which vLLM's own launcher uses | the row is a getter; only the start method of the engine process is read through it | the table accepts ``forkserver`` |
| `vllm.v1.engine.async_llm.renderer_from_config`, `vllm.v1.engine.async_llm.EngineCoreClient` | `server/engine/process.py`, API process only, while AsyncLLM is made | the engine process starts after the tokenizer is loaded, 1.9 s for 128,256 tokens | vLLM's own functions are called with the arguments that it gives, in the other order; other arguments fail the start | vLLM starts the engine first |
| row VLLM_MAX_STOP_STRINGS of `vllm.envs.environment_variables` | `server/vllm/importing.py`, API process and the one that reads bodies | vLLM's request models refuse more than 4 ``stop`` strings whatever ``--max-stop`` allows | the row is a getter, read as those models are made | vLLM takes the limit from a flag |
| `vllm.v1.engine.async_llm.AsyncLLM.output_processor` | `server/engine/outputs.py`, API process only | a request that waited too long looks like a fault of the server, and such a pooling request ends vLLM's output handler | it is a subclass that ends those requests first and leaves the rest to vLLM | vLLM's errors of a request carry a reason |
| `vllm.v1.engine.async_llm.AsyncLLM.logger_manager.__class__` | `server/engine/step_stats.py`, API process only | each step is recorded on its own, with cold caches: 13 % of what a token of a single stream costs here | it is a subclass that hands the same steps on in their order, at most 0.1 seconds later, and at once where a request starts or ends | vLLM records steps off the event loop |
| `vllm.v1.engine.core_client.BackgroundResources.output_socket` | `server/engine/socket.py`, API process only | pyzmq makes a future and a second turn of the event loop of every message: 30 % of what a token of a single stream costs here | it is a socket of pyzmq's own class over the same one, in place before anything is received | vLLM's client receives without pyzmq's asyncio machinery |
| `vllm.v1.engine.core_client.AsyncMPClient.outputs_queue` | `server/engine/socket.py`, API process only | asyncio's queue makes a dozen calls per message between the client's two tasks | it is a subclass with the same order, in place before anything is received; one task reads | vLLM's client has one task |
| `vllm.v1.engine.coordinator.DPCoordinatorProc`, `vllm.v1.engine.coordinator.MsgpackDecoder` | `server/engine/coordinator.py`, API process and the coordinator's own | a message of a stranger to the coordinator's port, which listens on the network, ends the coordinator and with it the deployment | subclasses that call vLLM's own; a message that no engine can have sent is read as one without content | vLLM's coordinator skips messages that it cannot decode |
| `vllm.entrypoints.generate.base.protocol.validate_structural_tag_payload` | `server/vllm/engine_client.py`, API process only | vLLM's request models parse structural tags on the event loop, for as long as that takes | the gate has compiled the same tag in a process of its own before, and ``EngineClient`` tries whatever reaches the engine | the models leave it to the engine |
| `vllm.v1.engine.async_llm.AsyncLLM.input_processor.structured_outputs_config` is None | `server/vllm/engine_client.py`, API process only | vLLM validates every grammar on the event loop | as above; ``PinnedXgrammar`` does what the validation rewrote (choices, Lark) | vLLM validates in a thread |
| `vllm.sampling_params.SamplingParams.structured_outputs` | `server/vllm/engine_client.py`, API process only | the engine compiles a schema of its own, which is not the one that was tried | the grammar that the gate made of the same schema takes its place, before the engine sees the request | vLLM asks a backend for the form in which a constraint is handed on |
| `vllm.entrypoints.openai.models.serving.OpenAIServingModels.lora_requests` | `server/vllm/adapters.py`, API process only | a name could go to another load of an adapter between a request's lease and vLLM's lookup | it is a mapping of names to the same objects, over the registry of adapters | vLLM asks a resolver for each request |
| `__class__` of copies of vLLM's serving instances | `server/vllm/serving.py`, API process only | an error of a stream is written into a frame, which hides its reason; a request of Anthropic's API is converted to a chat and validated a second time, on the event loop, and its stream once more for every token | the copies alone are of the subclasses, which raise what they would write, take requests that were converted before and make messages of chats | vLLM lets errors of a stream out as exceptions, and the conversion is a step of its own |
| `parser_cls`, `parser` of copies of vLLM's serving instances and of their `OnlineRenderer` | `server/vllm/serving.py`, API process only | a forced call of a tool that is not `strict` has any JSON for arguments, as has what merely looks like a call | the copies alone have them; a subclass of vLLM's parser, which lends it the tools' schemas while it makes the grammar and looks at calls as they come out | vLLM and xgrammar guide every forced call by its schema |
| `_apply_chat_template_async` of vLLM's renderer, `__class__` of its tokenizer | `server/vllm/rendering/tokenizer.py`, API process only | a chat template runs for as long, and in as much memory, as it takes, in the only thread that renders; text of a message becomes control tokens | the tokenizer is of a subclass whose `apply_chat_template` hands large conversations, and templates whose loops have no known bound, to the process that reads large bodies, with the same arguments, and calls vLLM's own for all others; its `__call__` encodes only prompts with such text differently | vLLM bounds what a template takes, and has transformers' `sanitize_control_tokens` |
| `vllm.renderers.params.TokenizeParams.get_encode_kwargs` | `server/vllm/rendering/counting.py`, API process only | prompts are cut one token behind the context, and errors name that length instead of theirs | texts are bounded before; whatever is too long is refused a moment later, as before | vLLM's error counts the whole prompt |
| `vllm.renderers.params.TokenizeParams.get_encode_kwargs` again, `__class__` of the tokenizer of a pooling model | `server/vllm/rendering/counting.py`, API process only | with a `truncation_side`, vLLM takes the first or last tokens of all: a separator or the query of a pair is lost | the tokenizer's own encoding is cut between its special tokens, only for requests with a side (`tests/server/vllm/test_truncation_sides.py`) | vLLM hands the side to the tokenizer |
| `vllm.v1.engine.output_processor.RequestState.__class__` | `server/engine/direct_outputs.py`, API process only | each token of a stream wakes the stream's task and passes all generators: more than half of what a token costs here | only states of streams whose outputs are texts alone are of the subclass, which makes vLLM's output of all that it does not push (`tests/server/vllm/test_direct_frames.py`) | vLLM's output processor takes a consumer of texts |
| `vllm.v1.engine.detokenizer.FastIncrementalDetokenizer.stream` | `server/engine/open_characters.py`, API process only | an answer whose prompt ends in U+FFFD begins with the text of the whole prompt | the stream of the same library, primed with the open character alone; only for such prompts | `DecodeStream` finds the prefix of such ids |
| `vllm.v1.engine.EngineCoreRequest.sampling_params.seed` | `server/vllm/engine_client.py`, API process only | the second answer of a seed is drawn like the first one of the next seed, and one that gets seed -1 is not repeatable | the field of the parameters that vLLM has copied for this one answer | vLLM makes seeds of answers that no request shares |
| `vllm.v1.request.Request.status`, `vllm.v1.request.Request.stop_reason` | `rbln_backend/scheduler/scheduler.py`, engine process | a request for which every token is forbidden gets token 0 | as vLLM's scheduler ends a request whose token a grammar refuses, in the same place | vLLM ends such requests |
| `vllm.v1.engine.output_processor.RequestState.logprobs_processor` | `server/engine/outputs.py`, API process only | logprobs of a prompt are returned with one output of a stream, and lost where that is merged into a queued output of another choice; a part of a character has an empty text, and no place in the answer is known | it is a subclass of vLLM's with the same state, whose outputs all have the prompt's, and whose entries of sampled tokens have their bytes and their place | vLLM keeps them when outputs are merged, and has bytes and offsets of tokens |
| `vllm.v1.engine.detokenizer.FastIncrementalDetokenizer.decode_next` | `server/vllm/logprobs/processor.py`, API process only | offsets of tokens in the text are guessed from the texts of tokens, also of those that the text lacks | it notes the length of the text and calls vLLM's own; only for requests with logprobs | the detokenizer has the offsets |
| `vllm.outputs.CompletionOutput.logprobs` | `server/vllm/logprobs/serving.py`, API process only | tokens of beams have no bytes and no place in the answer | entries of the same ranks and values, for one finished result that nothing else reads | beams come out of vLLM's output processor |
| `vllm.v1.engine.logprobs.convert_ids_list_to_tokens` | `server/vllm/logprobs/texts.py`, API process only | each of the tokens with log-probabilities is decoded again in each step, a third of what such a token costs in the HTTP process | it calls vLLM's function for tokens that it has not had, and writes bytes that are no text as OpenAI does; each text depends on its token alone (`tests/server/vllm/test_logprobs.py`) | vLLM keeps the texts |
| `vllm.v1.structured_output.StructuredOutputManager.backend` is set before the engine's first request | `rbln_backend/grammar/backend.py`, engine process | the first request chooses the backend and waits for it to be made, in the thread that takes requests in; a compile starts eight threads; whitespace has no bound | it is a subclass of the backend that the manager would make | the backend is a setting of the engine |
| `vllm.v1.structured_output.StructuredOutputManager.reasoner_cls` | `rbln_backend/grammar/backend.py`, engine process | a marker anywhere in the prompt decides whether a constraint binds, and a parser without tokens for its markers lets none bind | a class over vLLM's parser of that name, with its markers (`tests/server/vllm/tools/test_reasoning.py`) | vLLM reads whole answers, streams and prompts alike |
| `vllm.v1.core.sched.scheduler.Scheduler.kv_cache_manager` | `rbln_backend/scheduler/prefix_reuse.py`, engine process | prefixes are looked up in whole blocks, and windows not at all | it is a subclass over a subclass of vLLM's coordinator, put in before the first request; it takes over what vLLM's had, attribute by attribute | vLLM lets a platform choose the coordinator |
| `vllm.v1.core.sched.scheduler.Scheduler.scheduler_config.enable_chunked_prefill` | `rbln_backend/scheduler/narrowing.py`, engine process | of prompts that share a prefill step the last is cut, and takes part in it without a token to sample | it is off for the one call that takes those prompts, each of which fits, and on again whatever becomes of it; nothing else reads it meanwhile | vLLM lets a scheduler say which prompts may be cut |
| `vllm.v1.request.Request._block_hasher` | `rbln_backend/scheduler/prefix_reuse.py`, engine process | hashes are of whole blocks, and know an adapter by its name alone | vLLM's own hasher with another unit; all hashes are made anew at once | the engine's hash unit is a setting, and hashes know the load of an adapter |
| `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.lora_a_stacked`, `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.lora_b_stacked`, `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.output_slices`, `vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA._apply_lora_to_output` | `rbln_backend/lora/adapted.py`, worker processes | adapters lie in vLLM's layout and are packed anew for each step; hidden states lose the axes that an NPU wants | only the object's method reads the slots, which is ours and adds the same product | vLLM asks the platform for a layer's slots |
| `vllm.model_executor.models.interfaces.EagleModelMixin._maybe_add_hidden_state` | `rbln_backend/worker/draft_model.py`, worker processes with pipeline stages and EAGLE-3 | classes of MiniMax-M2, Qwen3-MoE and gpt-oss drop the hidden states that a draft model reads, except in the last stage; MiniMax-M2's numbers the layers of each stage from 0 | only the object's method is replaced, which vLLM calls with each state; ours adds the same sum to the stage's outputs | the class has `supports_aux_hidden_states_over_pp` (vllm-project/vllm#50514) |
| `vllm.model_executor.models.registry._run_in_subprocess` | ``inspect_models_here``, every process that reads flags | what a model class can do is looked up in a new Python, which imports vLLM again: six seconds for every model that a cache root has not seen | it is there to keep CUDA uninitialised, and there is none; the engine's process imports the class anyway | the platform may say where it happens |
| the check `has_arctic_inference` in the module of `SpeculativeConfig` | ``speculate_here``, every process that reads flags | ``--speculative-config '{"method": "suffix"}'`` is refused without the package arctic-inference | only the check is passed: drafts of that name are our own (`rbln_backend/speculation/suffix.py`), and nothing imports the package | vLLM leaves the check to who makes the drafts |
| `__post_init__` of vLLM's `VllmConfig` | ``schedule_in_order``, every process that reads flags | vLLM sets ``async_scheduling`` before it calls the platform, which then cannot see if the flag was given: a default of our own is not possible, nor a refusal of the flag alone | vLLM's own method runs, with False in place of None | vLLM asks the platform for the default |
| `vllm.sampling_params.SamplingParams._validate_spec_decode` | ``speculate_here``, every process that reads flags | requests with ``min_p`` or ``logit_bias`` are refused by an engine that speculates | drafts are sampled place by place by the ordinary sampler (`rbln_backend/worker/verification.py`), which knows both | vLLM's rejection sampler supports them, or calls the platform |
| `vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp.MiniMaxText01RMSNormTP.forward_qkv` | `rbln_backend/text_models/token_axes.py`, worker processes on an NPU | MiniMax-M2's norm of queries and keys takes rows alone, and calls a kernel of GPUs on several ranks | the same norm in float32, with one sum over the ranks (`tests/npu/test_minimax.py`) | the norm takes any axes |
| function `vllm` in ``ALL_ATTENTION_FUNCTIONS`` of transformers | `rbln_backend/text_models/transformers_axes.py`, worker processes on an NPU | vLLM's function makes one row of all requests | it calls the same layer with a row for each request | vLLM's Transformers backend takes a batch |
| rows of _PROCESSOR_CHAT_TEMPLATES in vLLM's renderer of Hugging Face templates | `server/vllm/rendering/processor.py`, API process only | vLLM imports transformers' models and loads the tokenizer again to learn that a text model has no processor | None is what vLLM would store: the checkpoint has no file and no field of a processor | vLLM looks for the files first |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_T = TypeVar("_T")


def inspect_models_here() -> None:
    """Make vLLM inspect model classes in this process; idempotent."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _call


def speculate_here() -> None:
    """Make vLLM accept draft methods and sampling parameters that we support; idempotent."""
    from vllm.config import speculative
    from vllm.sampling_params import SamplingParams

    SamplingParams._validate_spec_decode = _accept  # type: ignore[assignment, method-assign]
    speculative.has_arctic_inference = _yes  # type: ignore[attr-defined]


def schedule_in_order() -> None:
    """Make vLLM leave asynchronous scheduling off unless the flag is given; idempotent."""
    from vllm.config import VllmConfig

    VllmConfig.__post_init__ = _without_default(VllmConfig.__post_init__)  # type: ignore[method-assign]


def _without_default(settle: Callable[[VllmConfig], None]) -> Callable[[VllmConfig], None]:
    if getattr(settle, "has_no_default", False):
        return settle

    def settle_in_order(config: VllmConfig) -> None:
        if config.scheduler_config.async_scheduling is None:
            config.scheduler_config.async_scheduling = False
        settle(config)

    settle_in_order.has_no_default = True  # type: ignore[attr-defined]
    return settle_in_order


def apply_patches() -> None:
    """Apply the ledger's patches of this process; idempotent."""
    if torch.accelerator.is_available():
        return
    torch.accelerator.empty_cache = _nothing_to_empty
    torch.accelerator.empty_host_cache = _nothing_to_empty


def _nothing_to_empty() -> None:
    """Do nothing: there is no cache."""


def _accept(*_: object) -> None:
    """Accept any request."""


def _yes() -> bool:
    return True


def _call(fn: Callable[[], _T]) -> _T:
    return fn()
