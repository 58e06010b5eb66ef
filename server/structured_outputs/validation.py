"""`/v1/structured_outputs/validate` and `explain`: the gate's verdict without an answer."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import TypedDict

from server.errors import InvalidTypeError, InvalidValueError, describe
from server.structured_outputs.constraint import BACKEND, Constraint, ConstraintKind, Undeclared
from server.structured_outputs.explaining.enforcement import Place, Remark
from server.structured_outputs.explaining.explanation import MAX_SEED, GrammarSize, SampleText
from server.structured_outputs.gate import GrammarGate, refusal
from server.structured_outputs.request_constraints import format_constraint, kind_constraint
from server.structured_outputs.trial_job import TrialVerdict
from server.structured_outputs.undeclared_option import take_undeclared
from server.wire.endpoint import JsonObject

SEED = "seed"
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


class ExplainedVerdict(Verdict):
    """Verdict on a constraint, with what the grammar does and sample texts of it."""

    enforced: list[Place]
    narrowed: list[Remark]
    refused: list[Remark]
    grammar: GrammarSize | None
    samples: list[SampleText]


async def validate(body: JsonObject, gate: GrammarGate, default: Undeclared) -> Verdict:
    """Return the verdict on the one constraint in `body`; `default` is the server's rule.

    Raises `InvalidValueError` or `InvalidTypeError` for a body without one, and the gate's errors.
    """
    constraint = _constraint(body, default)
    return _shown(constraint, *await gate.verdict([constraint]))


async def explain(body: JsonObject, gate: GrammarGate, default: Undeclared) -> ExplainedVerdict:
    """Return the verdict on the one constraint in `body`, explained.

    Its `seed` selects the samples. Raises as `validate` does.
    """
    rest = {name: value for name, value in body.items() if name != SEED}
    seed = body.get(SEED)
    if seed is not None and (type(seed) is not int or not 0 <= seed <= MAX_SEED):
        raise InvalidValueError(
            f"'{SEED}' must be an integer from 0 to {MAX_SEED}, got {describe(seed)}.", param=SEED
        )
    constraint = _constraint(rest, default)
    found = await gate.explain(constraint, seed or 0)
    return {**_shown(constraint, found.verdict, cached=False), **found.explained}


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


def _constraint(body: JsonObject, default: Undeclared) -> Constraint:
    undeclared = take_undeclared(body, default)
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
    return replace(found[0], undeclared=undeclared)
