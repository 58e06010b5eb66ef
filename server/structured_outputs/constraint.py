"""A constraint of a request on its answer, and the limits of constraints."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from server import bounds
from server.settings import ServerSettings

BACKEND = "xgrammar"
"""vLLM's grammar backend, set by `rbln_backend.platform`; most constraints go to llguidance."""


class ConstraintKind(enum.Enum):
    """Kind of a constraint; the value is the field of `structured_outputs`."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint; `param` is its place in the request.

    `text` is JSON for a schema, a choice or a structural tag. Without `exact`, keywords that the
    grammar cannot express are ignored. A `derived` one was made by vLLM from parts that were
    inspected already. The schema of a `tagged` one goes to xgrammar unchanged, as part of a
    structural tag. `shares` is the number of its schemas,
    each of which adds the processor time of one.
    """

    kind: ConstraintKind
    text: str
    param: str
    exact: bool = True
    derived: bool = False
    tagged: bool = False
    shares: int = 1


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Size limits of a constraint; see `ServerSettings`."""

    max_bytes: int
    max_depth: int
    max_nodes: int
    max_enum: int
    max_pattern: int

    @classmethod
    def of(cls, settings: ServerSettings) -> SchemaLimits:
        """Return the limits of a server."""
        return cls(
            max_bytes=settings.schema_max_bytes,
            max_depth=bounds.SCHEMA_MAX_DEPTH,
            max_nodes=bounds.SCHEMA_MAX_NODES,
            max_enum=bounds.SCHEMA_MAX_ENUM,
            max_pattern=bounds.SCHEMA_MAX_PATTERN,
        )


class UnusableError(ValueError):
    """A constraint cannot be used; the message has the reason and the place in it."""


def job_key(constraints: Sequence[Constraint], *, exact: bool = True) -> bytes:
    """Return the cache key of constraints; without `exact`, as if none of them were exact."""
    digest = hashlib.sha256()
    for item in constraints:
        head = f"{item.kind.value} {item.exact and exact} {item.tagged} {len(item.text)}\n"
        digest.update(head.encode() + item.text.encode(errors="surrogatepass"))
    return digest.digest()
