"""Variables of chat templates that a request may set, in `chat_template_kwargs` and beside it.

vLLM passes whatever has a name that transformers' `apply_chat_template` knows to the tokenizer,
`padding` and `max_length` among it. Here only variables that the template declares pass. Pure
functions over plain bodies.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.errors import UnsupportedFieldError
from server.request.fields.rules import UnknownPolicy, refuse_unknown, unknown_field
from server.wire.endpoint import Endpoint, JsonObject

FIELD = "chat_template_kwargs"
_OWN_FIELDS = frozenset(
    ("tools", "chat_template", "add_generation_prompt", "continue_final_message", "messages")
)
"""Arguments of the renderer that requests have as fields."""
_SWITCHES = frozenset(
    (
        *("enable_thinking", "thinking", "thinking_mode", "thinking_budget", "reasoning_effort"),
        *("preserve_thinking", "clear_thinking", "drop_thinking"),
    )
)
"""Variables of well-known templates, which clients set whichever model they talk to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateVariables:
    """Variables of the served model's templates.

    `chat` are those of the chat template, `score` those of the template that joins a query and a
    document. `arguments` are the names of the renderer's and the tokenizer's own arguments.
    """

    chat: frozenset[str] = frozenset()
    score: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()

    def of(self, endpoint: Endpoint) -> frozenset[str]:
        """Return the variables of the template that an endpoint renders."""
        return self.score if endpoint.scores else self.chat


def settle_variables(
    endpoint: Endpoint,
    body: JsonObject,
    variables: TemplateVariables,
    policy: UnknownPolicy,
    own: frozenset[str] | None = None,
) -> list[str]:
    """Leave in `body` the variables that the template declares; return the paths of ignored ones.

    `own` are the variables of a template that the request brings. Raises `UnsupportedFieldError`
    for arguments of the tokenizer and for fields that the template does not show,
    `UnknownFieldError` for names that no template has.
    """
    declared = variables.of(endpoint) if own is None else own - variables.arguments
    _require_shown(endpoint, body, declared)
    given = body.get(FIELD)
    if not isinstance(given, dict):
        return []
    ignored: list[str] = []
    kept: JsonObject = {}
    for name, value in given.items():
        path = f"{FIELD}.{name}"
        if name in declared:
            kept[name] = value
        elif name in variables.arguments:
            raise _argument(path, name)
        elif name in _SWITCHES:
            ignored.append(path)
        else:
            refuse_unknown(unknown_field(path, declared), policy)
    body[FIELD] = kept
    return ignored


def _require_shown(endpoint: Endpoint, body: JsonObject, declared: frozenset[str]) -> None:
    """Raise `UnsupportedFieldError` for a text of the prompt that the template leaves out."""
    name = "instruction" if endpoint.scores else "documents"
    if (endpoint.scores or endpoint.chats) and body.get(name) and name not in declared:
        raise UnsupportedFieldError(
            f"'{name}' is not supported: the template of the served model does not show it.",
            param=name,
        )


def _argument(path: str, name: str) -> UnsupportedFieldError:
    hint = f"; send the field '{name}'" if name in _OWN_FIELDS else ""
    return UnsupportedFieldError(
        f"'{path}' is not supported: '{name}' is an argument of the tokenizer or the renderer, not "
        f"a variable that the chat template declares{hint}.",
        param=path,
    )
