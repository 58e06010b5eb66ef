"""Variables that the templates of a served model declare, read from the templates themselves."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import InvalidValueError
from server.request.options import TemplateVariables

if TYPE_CHECKING:
    from vllm.renderers.online_renderer import OnlineRenderer

_GLOBALS = frozenset((*DEFAULT_NAMESPACE, "raise_exception", "strftime_now", "messages"))
"""Names that transformers gives every template."""
_SPECIAL_TOKENS = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
"""Transformers' variable names of special tokens, for every tokenizer."""
_DOCUMENTS = "documents"
"""An argument of the tokenizer that only sets the variable of that name."""
_WITHOUT_TEMPLATE = frozenset(("thinking", "enable_thinking", "drop_thinking", "reasoning_effort"))
"""Variables read by vLLM's encoders of models without a chat template, such as DeepSeek-V3.2."""
_CACHED_TEMPLATES = 32


def template_variables(online: OnlineRenderer) -> TemplateVariables:
    """Return the variables that requests may set in the templates behind vLLM's renderer."""
    from vllm.renderers.hf import HfRenderer

    renderer: Any = online.renderer
    tokenizer = renderer.tokenizer
    if tokenizer is None:
        return TemplateVariables()
    arguments = _arguments(tokenizer)
    if not isinstance(renderer, HfRenderer):
        return TemplateVariables(chat=_WITHOUT_TEMPLATE, arguments=arguments)
    chat: frozenset[str] = frozenset()
    for template in templates_of(online):
        chat |= _declared_or_none(template)
    score = frozenset() if online.chat_template is None else _declared_or_none(online.chat_template)
    return TemplateVariables(chat=chat - arguments, score=score - arguments, arguments=arguments)


@lru_cache(maxsize=_CACHED_TEMPLATES)
def declared_by(template: str) -> frozenset[str]:
    """Return the variables of a request's own template. Raises `InvalidValueError`."""
    try:
        return _declared(template)
    except TemplateError as error:
        raise InvalidValueError(
            f"'chat_template' is not a Jinja template: {error}.", param="chat_template"
        ) from None


def templates_of(online: OnlineRenderer) -> set[str]:
    """Return the templates that vLLM chooses from: with and without tools."""
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    renderer: Any = online.renderer
    if not isinstance(renderer, HfRenderer) or renderer.tokenizer is None:
        return set()

    choices: tuple[list[Any] | None, ...] = (None, [])
    chosen = (
        resolve_chat_template(
            renderer.tokenizer,
            chat_template=online.chat_template,
            tools=tools,
            model_config=online.model_config,
        )
        for tools in choices
    )
    return {template for template in chosen if template is not None}


def _declared_or_none(template: str) -> frozenset[str]:
    """Return the variables of the served template; none if it cannot be parsed."""
    try:
        return _declared(template)
    except TemplateError:
        return frozenset()


def _declared(template: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(parsed(template)))


@lru_cache(maxsize=_CACHED_TEMPLATES)
def parsed(template: str) -> nodes.Template:
    """Return the syntax tree of a chat template. Raises `TemplateError`."""
    from vllm.renderers.hf import AssistantTracker

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AssistantTracker, loopcontrols]
    )
    return environment.parse(template)


def _arguments(tokenizer: Any) -> frozenset[str]:
    """Return the names that templates do not declare: arguments, globals and special tokens."""
    from transformers import PythonBackend
    from vllm.renderers.hf import safe_apply_chat_template

    functions = (
        PythonBackend.apply_chat_template,
        tokenizer.apply_chat_template,
        safe_apply_chat_template,
    )
    names = {name for function in functions for name in inspect.signature(function).parameters}
    special = {*getattr(tokenizer, "special_tokens_map", ()), *_SPECIAL_TOKENS}
    return frozenset(names | _GLOBALS | special) - {_DOCUMENTS}
