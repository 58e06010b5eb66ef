"""Row of a table of fields: its kind, its conditions and the rule for it. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FieldKind(enum.Enum):
    """Content of a field: selects its size limit in `sizes` and its check in `limits`."""

    MESSAGES = enum.auto()
    CONVERSATION = enum.auto()
    """Items or parts of a conversation; or a text."""
    PROMPTS = enum.auto()
    """A text, token ids, or a list of either."""
    TEXT = enum.auto()
    """A text that is joined to prompts."""
    TOKENS = enum.auto()
    """Token ids of one text."""
    IDS = enum.auto()
    """Token ids of an option."""
    BIASES = enum.auto()
    TOOLS = enum.auto()
    GRAMMAR = enum.auto()
    """Constraints of an answer; the gate of structured outputs has further limits."""
    WORDS = enum.auto()
    """A few short texts."""
    STOP = enum.auto()
    TEMPLATE = enum.auto()
    NAME = enum.auto()
    """A short text."""
    OPTIONS = enum.auto()
    """One value, or an object of options or of a client's own labels."""
    EXTRA_ARGS = enum.auto()
    """Options of logits processors and KV events."""
    TRANSFER = enum.auto()
    """Where the KV of a prompt is, or that it is to be kept for another server."""
    MEDIA = enum.auto()
    """Options of images, audio and video."""
    EFFORT = enum.auto()
    ANSWERS = enum.auto()
    PRIORITY = enum.auto()
    BEAM_SEARCH = enum.auto()
    MAX_TOKENS = enum.auto()
    TRUNCATION = enum.auto()
    DIMENSIONS = enum.auto()
    ENCODING = enum.auto()

    @property
    def is_plain(self) -> bool:
        """True for one value or one object of options."""
        return self.value >= FieldKind.NAME.value


class FieldAction(enum.Enum):
    """Action of the server on a field."""

    OBEYED = "obeyed"
    """The request model has it."""
    GRANTED = "granted"
    """The server always does this; the field is removed."""
    IGNORED = "ignored"
    """The field is removed and named in a header of the answer, which is correct without it."""
    REFUSED = "refused"
    """An answer without it would be wrong."""


class PromptRole(enum.Enum):
    """Part of a field in the prompts of a request."""

    COUNTED = "counted"
    """Each of its prompts has an answer; errors about a too long prompt name this field."""
    CONTEXT = "context"
    """Joined to the counted prompts."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an API; `path` has `[]` for the items of an array.

    `action` None leaves it to the request model, and the docs omit it. `same` are the values,
    besides null, that mean the default: they are accepted. `stays`: accepted values are left in the
    body. `when` limits the rule to objects with these entries, `only` to these values. `schema` is
    the schema of an obeyed field that the request model does not have. `code` is the error code for
    Anthropic's clients. `needs` is a field that must be true beside this one, unless the value is
    in `idle`. `without_beams`: beam search accepts the values of `idle` alone.
    """

    path: str
    action: FieldAction | None = None
    why: str = ""
    kind: FieldKind = FieldKind.OPTIONS
    prompt: PromptRole | None = None
    same: tuple[object, ...] = ()
    stays: bool = False
    when: Mapping[str, object] = field(default_factory=dict)
    only: tuple[object, ...] = ()
    schema: Mapping[str, object] = field(default_factory=dict)
    code: str | None = None
    needs: str = ""
    idle: tuple[object, ...] = ()
    without_beams: bool = False
