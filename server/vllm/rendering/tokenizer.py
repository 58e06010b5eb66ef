"""vLLM's tokenizer, whose chat template is rendered in another process where that may take long.

A rendering is Python code of the template's author over a client's lists: in the process that reads
large bodies it has a limit of time and of memory, and holds no thread of this one up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

from server.errors import ContextLengthError
from server.vllm.rendering.job import Rendered, Rendering

SMALL_MESSAGES = 160
"""Fewer messages, of a small body, are rendered within milliseconds."""

Send = Callable[[bytes], Coroutine[Any, Any, Rendered]]
"""Sends a job to another process."""

large_var: ContextVar[bool] = ContextVar("large", default=False)
"""True if the body of the current request was too large for parsing on the event loop."""


_thread = threading.local()
"""Its `is_large` is true in threads that render conversations of large bodies."""


class RemoteTemplates:
    """Renders small conversations in place and others in another process; blocks meanwhile."""

    def __init__(self, send: Send, served: Collection[str], max_chars: int) -> None:
        """Use from the event loop; `served` are the templates of the served model."""
        self._send = send
        self._served = frozenset(served)
        self._max_chars = max_chars
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def apply(
        self, here: Callable[..., Any], tokens: dict[str, str], conversation: Any, **arguments: Any
    ) -> Any:
        """Return the prompt. Raises `TemplateError`, `ContextLengthError` or what `send` raises."""
        served = arguments.get("chat_template") in self._served
        is_large = getattr(_thread, "is_large", False)
        small = served and not is_large and len(conversation) <= SMALL_MESSAGES
        # The loop's own thread must not wait for the loop; it renders the warm-up alone.
        if small or arguments.get("tokenize", True) or threading.get_ident() == self._loop_thread:
            return self._bounded(here(conversation, **arguments))
        job = Rendering(conversation, arguments, tokens).as_job()
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


def render_elsewhere(renderer: Any, templates: RemoteTemplates, workers: int) -> None:
    """Make vLLM's renderer send large conversations to another process.

    A tokenizer with an `apply_chat_template` of its own stays as it is.
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
        # Of large conversations, so many are waited for that the others have a thread.
        return await (large if large_var.get() else small)(*args, **kwargs)

    renderer._apply_chat_template_async = apply

    class RemoteTemplateTokenizer(type(tokenizer)):  # type: ignore[misc]
        """Mixin for the tokenizer's class, as vLLM's own pool of tokenizers."""

        def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any:
            """Return the prompt, as the base class does."""
            here = super().apply_chat_template
            return templates.apply(here, self.special_tokens_map, conversation, **arguments)

    tokenizer.__class__ = RemoteTemplateTokenizer


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
