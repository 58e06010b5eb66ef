"""The schema that is rewritten: places of its parts, references, unsupported parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.structured_outputs.constraint import Undeclared
from server.structured_outputs.schema_walk import Schema, every_schema, resolve

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

NOT_ONE_OF = "\0notOneOf"
"""Internal keyword: excluded values."""
NOT_TYPES = "\0notTypes"
"""Internal keyword: excluded types; unlike `type`, it implies no type."""
NOT_PATTERNS = "\0notPatterns"
"""Internal keyword: patterns that do not match a string."""
NOT_FORMATS = "\0notFormats"
"""Internal keyword: formats that a string does not have."""
NOT_MULTIPLES = "\0notMultiples"
"""Internal keyword: numbers of which a number is no multiple."""
HAS = "\0has"
"""Internal keyword: pairs of schemas; some property has a name and a value that satisfy a pair."""
LATER = "\0later"
"""Internal keyword: pairs; some item from an index on satisfies a schema."""
NEGATIVE = "\0negative"
"""Internal keyword: the schema comes from a negation, and so evaluates no property."""
SILENT = "\0silent"
"""Internal keyword: a schema that applies, all parts of which are `NEGATIVE`."""


class InexactError(ValueError):
    """A part of a schema has no rewriting; the message names it and an alternative."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Schemas that apply to one value together; equal if their texts are."""

    key: str
    schemas: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key == other.key

    @classmethod
    def of(cls, *schemas: Any) -> Node:
        """Return the node of these schemas, without duplicates and in their order."""
        # Equal texts of Python's are of equal JSON, and take less time.
        texts = {repr(schema): schema for schema in schemas if schema is not True and schema != {}}
        return cls("&".join(texts), tuple(texts.values()))


class SchemaDocument:
    """One schema and its parts that have no rewriting.

    A `wide` one serves proofs that no value satisfies a schema: its shapes hold at least all valid
    values, and parts without a rewriting are ignored. An `open` one takes undeclared parts.
    """

    def __init__(
        self,
        root: Any,
        *,
        draft: int,
        undeclared: Undeclared = Undeclared.OMIT,
        wide: bool = False,
    ) -> None:
        """`root` has the keywords of 2020-12; `draft` is the one that it was written in."""
        self.root = root
        self.wide = wide
        self.open = wide or undeclared is Undeclared.ALLOW
        self._draft = draft
        self.left_out: list[str] = []
        self._places: dict[int, str] | None = None
        self._validator: Validator | None = None

    def widened(self) -> SchemaDocument:
        """Return the same schema as a wide document."""
        return SchemaDocument(self.root, draft=self._draft, wide=True)

    def place(self, schema: Any) -> str:
        """Return the place of the schema; the root for one that rewriting made."""
        if self._places is None:
            self._places = {id(part): path for path, part in every_schema(self.root)}
        return self._places.get(id(schema), "$")

    def leave_out(self, schema: Any, reason: object) -> None:
        """Note a part that the grammar does not follow."""
        line = f"{self.place(schema)}: {reason}"
        if line not in self.left_out:
            self.left_out.append(line)

    def target(self, schema: Schema) -> Any:
        """Return the target of the schema's `$ref`. Raises `UnusableError`."""
        return resolve(self.root, schema["$ref"], self.place(schema))

    def is_valid(self, value: Any, schema: Any) -> bool:
        """Return True if a JSON value satisfies a schema of this document."""
        if self._validator is None:
            self._validator = _validator_of(self.root, self._draft)
        return self._validator.evolve(schema=schema).is_valid(value)


def _validator_of(root: Any, draft: int) -> Validator:
    # See `trial_process` for when jsonschema is imported.
    from jsonschema.validators import Draft202012Validator

    return (_draft_4() if draft == 4 else Draft202012Validator)(root)


@functools.cache
def _draft_4() -> type[Validator]:
    """Return a validator of this document's keywords; in draft 4, 1.0 is not an integer."""
    from jsonschema.validators import Draft4Validator, Draft202012Validator, extend

    kind: type[Validator] = extend(  # type: ignore[no-untyped-call]
        Draft202012Validator, type_checker=Draft4Validator.TYPE_CHECKER
    )
    return kind
