"""The schema that is rewritten: where its parts are, what they refer to, what was left out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jsonschema.protocols import Validator
from jsonschema.validators import Draft4Validator, Draft202012Validator, extend

from server.structured_outputs.schema_walk import Schema, every_schema, resolve

NOT_ONE_OF = "\0notOneOf"
"""Keyword of our own: values that are excluded."""
NOT_TYPES = "\0notTypes"
"""Keyword of our own: types that are excluded; unlike `type`, it names none that is meant."""
NEGATIVE = "\0negative"
"""Keyword of our own: the schema says what a negated one forbids; it evaluates no property."""
SILENT = "\0silent"
"""Keyword of our own: a schema that applies, every part of which is `NEGATIVE`."""


# Where 1.0 is no integer.
_Draft4 = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, type_checker=Draft4Validator.TYPE_CHECKER
)


class InexactError(ValueError):
    """A part of a schema has no rewriting; the message says which, and what to write instead."""


@dataclass(frozen=True, slots=True)
class Node:
    """Schemas that apply to one value together; equal if they read the same."""

    key: str
    schemas: tuple[Any, ...] = field(compare=False)

    @classmethod
    def of(cls, *schemas: Any) -> Node:
        """Return the node of these schemas, each once and in their order."""
        texts = {json.dumps(schema): schema for schema in schemas if schema not in (True, {})}
        return cls("&".join(texts), tuple(texts.values()))


class Document:
    """One schema and what is noted of it on the way.

    A `wide` one is read for proofs that no value satisfies a schema: nothing is narrowed, and what
    has no rewriting is left out in silence.
    """

    def __init__(self, root: Any, *, draft: int, wide: bool = False) -> None:
        """`root` is in today's keywords, whatever `draft` it was written in."""
        self.root = root
        self.wide = wide
        self._draft = draft
        self.left_out: list[str] = []
        self._places = {id(schema): path for path, schema in every_schema(root)}
        self._validator: Validator = (_Draft4 if draft == 4 else Draft202012Validator)(root)

    def widened(self) -> Document:
        """Return the same schema, read widely."""
        return Document(self.root, draft=self._draft, wide=True)

    def place(self, schema: Any) -> str:
        """Return where the schema stands; the whole for one that was made on the way."""
        return self._places.get(id(schema), "$")

    def leave_out(self, schema: Any, reason: object) -> None:
        """Note what the grammar does not follow."""
        line = f"{self.place(schema)}: {reason}"
        if line not in self.left_out:
            self.left_out.append(line)

    def target(self, schema: Schema) -> Any:
        """Return what the schema's `$ref` names. Raises `UnusableError`."""
        return resolve(self.root, schema["$ref"], self.place(schema))

    def is_valid(self, value: Any, schema: Any) -> bool:
        """Whether a JSON value satisfies a schema of this document."""
        return self._validator.evolve(schema=schema).is_valid(value)
