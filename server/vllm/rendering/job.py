"""One rendering of a chat template as a job of the process that reads large bodies."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import TemplateError

from server.vllm.rendering.control_tokens import ControlTokens, spelled

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
        """Return the job's bytes."""
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
            """The variables that transformers adds to every template."""
            return dict(self.__dict__["_given_tokens"])

    return TemplateTokenizer
