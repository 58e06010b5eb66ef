"""Rules of one server for request bodies: every limit and option that parsing depends on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rbln_backend import api
from server import bounds
from server.request.options import TemplateVariables, ThinkingSupport
from server.request.rules import UnknownPolicy
from server.request.sizes import RequestLimits
from server.request.values import REPORT_MODE
from server.settings import ServerSettings
from server.tools.support import ToolSupport
from server.vllm.messages.requests import merges_inline_system, thinking_support_of
from server.vllm.rendering.variables import template_variables
from server.vllm.tools.schemas import rewrites_arguments
from server.wire.endpoint import JsonObject

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.config import ModelConfig, VllmConfig
    from vllm.tasks import SupportedTask


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
            dimensions=_dimensions(model),
        ),
        unknown_fields=settings.unknown_fields,
        max_json_depth=bounds.MAX_JSON_DEPTH,
        merge_inline_system=merges_inline_system(
            getattr(state, "anthropic_serving_messages", None)
        ),
        thinking=thinking_support_of(getattr(state, "openai_serving_chat", None)),
        variables=template_variables(state.online_renderer),
        own_templates=state.online_renderer.trust_request_chat_template,
        tools=tools,
        guided="generate" in tasks,
        rewrites_tools=rewrites_arguments(tools.parser),
        speculates=config.speculative_config is not None,
        sampling=model.get_diff_sampling_param(),
        offered=offered,
        does=_in_words(tasks, model),
    )


def _in_words(tasks: tuple[SupportedTask, ...], model: ModelConfig) -> str:
    """Return the model's task in words, for errors."""
    if "generate" in tasks:
        return "generates text; one that pools is served with --runner pooling"
    task = model.get_pooling_task(tasks)
    if task in ("classify", "token_classify"):
        return f"pools for the task {task!r} with {model.hf_config.num_labels} labels"
    return f"pools for the task {task!r}"


def _dimensions(model: ModelConfig) -> range | tuple[int, ...]:
    sizes = range(1, model.embedding_size + 1)
    return (tuple(model.matryoshka_dimensions or ()) or sizes) if model.is_matryoshka else ()


def _extra_args(config: VllmConfig) -> frozenset[str] | None:
    """Return the keys of `vllm_xargs` that something reads; None where processors may read any."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    if config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
        return None
    events = config.kv_events_config
    return frozenset((REPORT_MODE,) if events is not None and events.enable_kv_cache_events else ())
