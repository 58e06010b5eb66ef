"""Chat templates of large conversations, which are rendered in another process.

A rendering is Python code of the template's author over a client's lists: in the process that reads
large bodies it has a limit of time and of memory, and holds no thread of this one up. Texts of the
conversation do not become control tokens (`server.vllm.control_tokens`).
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from server.errors import ContextLengthError
from server.vllm.control_tokens import (
    ControlTokens,
    PlainTextEncoder,
    SpelledPrompt,
    control_tokens_of,
    spelled,
)
from server.vllm.patches import use_template_renderer
from server.vllm.templates import is_bounded

if TYPE_CHECKING:
    from vllm.renderers.online_renderer import OnlineRenderer

logger = logging.getLogger(__name__)

MARK = b"RENDER\n"
"""The prefix of rendering jobs; jobs about bodies begin with the name of an endpoint."""

_OF_TEMPLATES = (
    *(TemplateError, LookupError, TypeError, ValueError),
    *(AttributeError, ArithmeticError, RuntimeError),
)
"""The exceptions of templates, raised explicitly or by an unexpected conversation."""

_QUOTES = "\nRendered chat:\n"
_NOT_CONTINUED = (
    "The last message cannot be continued: the chat template leaves it out or changes its text."
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """Everything a chat template needs; `arguments` are those of `apply_chat_template`.

    `control_tokens` are those that the texts of the conversation must not become.
    """

    conversation: list[Any]
    arguments: dict[str, Any]
    special_tokens: dict[str, str]
    control_tokens: ControlTokens | None = None

    def run(self, apply: Callable[..., Any]) -> Any:
        """Return the prompt that `apply` makes: transformers' `apply_chat_template`."""
        template = {"chat_template": self.arguments["chat_template"]}
        variables = {k: v for k, v in self.arguments.items() if k not in template}
        conversation, tokens = self.conversation, self.control_tokens
        marked = tokens is not None and tokens.may_occur(conversation, variables)
        if tokens is not None and marked:
            conversation, variables = tokens.mark(conversation, variables)
        try:
            prompt = apply(conversation, **template, **variables)
        except (TemplateError, ValueError) as error:
            # transformers quotes the whole prompt, with the template's own instructions.
            quotes = _QUOTES in str(error)
            if not quotes and not marked:
                raise
            reason = _NOT_CONTINUED if quotes else str(spelled(str(error)))
            raise TemplateError(reason) from None
        return spelled(prompt) if marked else prompt

    def as_job(self) -> bytes:
        return MARK + pickle.dumps(self, pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, or the template's error."""

    prompt: str = ""
    reason: str | None = None


def render(job: bytes) -> Rendered:
    """Render a job's conversation by its template. Raises `MemoryError`."""
    rendering: Rendering = pickle.loads(job[len(MARK) :])  # noqa: S301 (written by `as_job`)
    tokenizer = _template_tokenizer()(rendering.special_tokens)
    try:
        prompt = rendering.run(tokenizer.apply_chat_template)
    except RecursionError:
        return Rendered(reason="its macros call themselves too often.")
    except _OF_TEMPLATES as error:
        return Rendered(reason=str(error))
    return Rendered(prompt)


@cache
def _template_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerBase

    class TemplateTokenizer(PreTrainedTokenizerBase):
        """A tokenizer without a vocabulary, which is all that a template needs of one."""

        chat_template = None

        def __init__(self, special_tokens: dict[str, str]) -> None:
            """Initialise nothing else: the base class would look for a vocabulary."""
            self.__dict__["_given_tokens"] = special_tokens

        @property
        def special_tokens_map(self) -> dict[str, str]:
            return dict(self.__dict__["_given_tokens"])

    return TemplateTokenizer


SMALL_MESSAGES = 160
"""Fewer messages, of a small body, are rendered within milliseconds by most templates."""

TokensOf = Callable[[str], ControlTokens]
Send = Callable[[bytes], Coroutine[Any, Any, Rendered]]
"""Sends a job to another process."""

_CACHED_TEMPLATES = 32

large_var: ContextVar[bool] = ContextVar("large", default=False)
"""True if the body of the current request was too large for parsing on the event loop."""

_thread = threading.local()
"""Its `is_large` is true in threads that render conversations of large bodies."""


class RemoteTemplates:
    """Renders small conversations in place and others in another process; blocks meanwhile."""

    def __init__(
        self,
        send: Send,
        served: Collection[str],
        max_chars: int,
        tokens_of: TokensOf | None = None,
    ) -> None:
        """Use from the event loop.

        `served` are the templates of the served model. `tokens_of` returns the control tokens of a
        template that texts must not become.
        """
        self._send = send
        self._in_place = frozenset(filter(is_bounded, served))
        self._all_in_place = len(self._in_place) == len(served)
        self._max_chars = max_chars
        self._tokens_of = tokens_of
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def waits(self, template: str | None) -> bool:
        """Return True if a small conversation may be rendered in another process.

        `template` None is one of those that are served.
        """
        return not self._all_in_place if template is None else template not in self._in_place

    def apply(
        self, here: Callable[..., Any], tokens: dict[str, str], conversation: Any, **arguments: Any
    ) -> Any:
        """Return the prompt. Raises `TemplateError`, `ContextLengthError` or what `send` raises."""
        template = arguments.get("chat_template")
        small = not getattr(_thread, "is_large", False) and len(conversation) <= SMALL_MESSAGES
        # The loop's own thread must not wait for the loop; it renders the warm-up alone.
        if arguments.get("tokenize", True) or threading.get_ident() == self._loop_thread:
            return self._bounded(here(conversation, **arguments))
        control = None if self._tokens_of is None else self._tokens_of(template or "")
        rendering = Rendering(conversation, arguments, tokens, control)
        if small and template in self._in_place:
            return self._bounded(rendering.run(here))
        job = rendering.as_job()
        done = asyncio.run_coroutine_threadsafe(self._send(job), self._loop).result()
        if done.reason is not None:
            raise TemplateError(done.reason)
        return self._bounded(done.prompt)

    def _bounded(self, prompt: Any) -> Any:
        if isinstance(prompt, str) and len(prompt) > self._max_chars:
            raise ContextLengthError(
                f"The chat template makes {len(prompt)} characters of the conversation; at most "
                f"{self._max_chars} can be tokenized."
            )
        return prompt


def sanitizer(online: OnlineRenderer) -> tuple[TokensOf | None, PlainTextEncoder | None]:
    """Return what keeps texts from becoming control tokens; None for a tokenizer without them.

    Tokenizers that are not of the `tokenizers` library are left as they are, with a warning.
    """
    tokenizer: Any = online.renderer.tokenizer
    added: Any = getattr(tokenizer, "added_tokens_decoder", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        if added:
            logger.warning("control tokens in texts are not sanitized: the tokenizer is not fast")
        return None, None
    named = ""
    if online.parser is not None and online.parser.reasoning_parser_cls is not None:
        options: dict[str, Any] = {"chat_template_kwargs": {}, "model_config": online.model_config}
        parser = online.parser.reasoning_parser_cls(tokenizer, **options)
        named = f"{parser.reasoning_start_str}\0{parser.reasoning_end_str}"

    @lru_cache(maxsize=_CACHED_TEMPLATES)
    def tokens_of(template: str) -> ControlTokens:
        return control_tokens_of(template, added.values(), named)

    return tokens_of, PlainTextEncoder(backend, added)


def render_elsewhere(
    renderer: Any, templates: RemoteTemplates, workers: int, encoder: PlainTextEncoder | None
) -> None:
    """Make vLLM's renderer send large conversations to another process.

    `encoder` tokenizes the prompts of marked conversations. A tokenizer with an
    `apply_chat_template` of its own stays as it is.
    """
    from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
    from vllm.utils.async_utils import make_async

    tokenizer = renderer.tokenizer
    if not isinstance(renderer, HfRenderer) or not _has_plain_templates(tokenizer):
        return
    small = renderer._apply_chat_template_async
    threads = ThreadPoolExecutor(
        workers, "large-templates", lambda: setattr(_thread, "is_large", True)
    )
    large = make_async(safe_apply_chat_template, executor=threads)

    async def apply(*args: Any, **kwargs: Any) -> Any:
        # Of those rendered elsewhere, so many are waited for that the others have a thread.
        waits = large_var.get() or templates.waits(kwargs.get("chat_template"))
        return await (large if waits else small)(*args, **kwargs)

    class RemoteTemplateTokenizer(type(tokenizer)):  # type: ignore[misc]
        """Mixin for the tokenizer's class, as vLLM's own pool of tokenizers."""

        def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any:
            here = super().apply_chat_template
            return templates.apply(here, self.special_tokens_map, conversation, **arguments)

        def __call__(self, text: Any = None, *args: Any, **arguments: Any) -> Any:
            if encoder is None or not isinstance(text, SpelledPrompt):
                return super().__call__(text, *args, **arguments)
            ids, offsets = encoder.encode(
                text,
                arguments.get("max_length") if arguments.get("truncation") else None,
                arguments.get("truncation_side") or self.truncation_side,
                adds_special=arguments.get("add_special_tokens", True),
            )
            return {"input_ids": ids, "offset_mapping": offsets}

    use_template_renderer(renderer, RemoteTemplateTokenizer, apply)


def _has_plain_templates(tokenizer: Any) -> bool:
    """Return True if transformers' own method renders the templates."""
    from transformers import PreTrainedTokenizerBase
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    classes = (
        kind
        for kind in type(tokenizer).__mro__
        if "apply_chat_template" in vars(kind) and not issubclass(kind, ThreadSafeHFTokenizerMixin)
    )
    return next(classes, None) is PreTrainedTokenizerBase
