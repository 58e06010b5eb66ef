"""What an answer is to obey: one constraint of a request, its limits, why it is refused."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from server.settings import ServerSettings

BACKEND = "xgrammar"
"""The grammar backend of vLLM's that `rbln_backend.platform` pins; rewritten schemas go to
llguidance all the same."""


class Kind(enum.Enum):
    """How a constraint is written; the value is the field of `structured_outputs`."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint; `param` is where the request has it.

    `text` is what the engine gets: JSON for a schema, a choice or a structural tag. One that is
    not `exact` is followed as far as the backend can. A `derived` one was made by vLLM of parts
    that were inspected one by one, and is only tried. A schema that is `tagged` may come to stand
    in a structural tag, of which the backend takes schemas as they are; others are rewritten.
    `shares` is how many schemas it consists of, each of which has the time of one.
    """

    kind: Kind
    text: str
    param: str
    exact: bool = True
    derived: bool = False
    tagged: bool = False
    shares: int = 1


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """How large a constraint may be; see `SchemaSettings`."""

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
            max_depth=settings.schema_max_depth,
            max_nodes=settings.schema_max_nodes,
            max_enum=settings.schema_max_enum,
            max_pattern=settings.schema_max_pattern,
        )


class UnusableError(ValueError):
    """A constraint cannot be used; the message says why and where in it."""


def job_key(constraints: Sequence[Constraint], *, exact: bool = True) -> bytes:
    """Return what tells two sets of constraints apart; without `exact`, as if none were."""
    digest = hashlib.sha256()
    for item in constraints:
        head = f"{item.kind.value} {item.exact and exact} {item.tagged} {len(item.text)}\n"
        digest.update(head.encode() + item.text.encode(errors="surrogatepass"))
    return digest.digest()
