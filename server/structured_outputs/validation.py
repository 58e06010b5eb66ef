"""`/v1/structured_outputs/validate`: the gate's verdict without an answer."""

from __future__ import annotations

from typing_extensions import TypedDict

from server.errors import InvalidTypeError, InvalidValueError, describe
from server.structured_outputs.constraint import BACKEND, Constraint, ConstraintKind
from server.structured_outputs.gate import GrammarGate, refusal
from server.structured_outputs.request_constraints import format_constraint, kind_constraint
from server.structured_outputs.trial_job import TrialVerdict
from server.wire.endpoint import JsonObject

FIELDS = (*(kind.value for kind in ConstraintKind), "response_format")


class Verdict(TypedDict):
    """Verdict on a constraint; `compile_ms` is null if nothing was compiled."""

    valid: bool
    reason: str | None
    code: str | None
    param: str
    backend: str
    compile_ms: float | None
    cached: bool


async def validate(body: JsonObject, gate: GrammarGate) -> Verdict:
    """Return the verdict on the one constraint in `body`.

    Raises `InvalidValueError` or `InvalidTypeError` for a body without one, and the gate's errors.
    """
    constraint = _constraint(body)
    return _shown(constraint, *await gate.verdict([constraint]))


def _shown(constraint: Constraint, verdict: TrialVerdict, cached: bool) -> Verdict:
    error = None if verdict.reason is None else refusal(constraint, verdict.reason)
    seconds = verdict.seconds
    return {
        "valid": error is None,
        "reason": None if error is None else error.message,
        "code": None if error is None else error.code,
        "param": constraint.param,
        "backend": BACKEND,
        "compile_ms": None if seconds is None else round(seconds * 1000, 3),
        "cached": cached,
    }


def _constraint(body: JsonObject) -> Constraint:
    given = [name for name in FIELDS if name in body]
    if len(given) != 1:
        raise InvalidValueError(
            f"The body must have exactly one of {', '.join(FIELDS)}; it has "
            f"{' and '.join(given) or 'none'}."
        )
    name = given[0]
    if name == "response_format":
        found = format_constraint(body[name], name)
    else:
        found = kind_constraint(name, body[name], name)
    if not found:
        raise InvalidTypeError(
            f"The field '{name}' has no constraint of an answer: {describe(body[name])}.",
            param=name,
        )
    return found[0]
