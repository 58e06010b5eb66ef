"""`/v1/structured_outputs/explain`: what a constraint means to this server, with sample texts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import TypedDict

from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
)
from server.structured_outputs.explaining.enforcement import (
    Place,
    Remark,
    enforced_places,
    narrowed_places,
    property_names,
    refused_places,
)
from server.structured_outputs.inspection import parsed
from server.structured_outputs.rewriting.rewriting import Rewriting
from server.structured_outputs.trial_job import TrialVerdict, constraint_of, do_job, job_bytes

SAMPLES = 5
SAMPLE_TOKENS = 200
SAMPLE_S = 0.1
"""Processor time of one sample; a text that takes longer is cut off."""
MAX_SEED = 2**32 - 1
_RULE = re.compile(r"^[A-Za-z_]\w*(?:::_)?:", re.MULTILINE)


class SampleText(TypedDict):
    """A text that the grammar allows; without `complete`, the beginning of one."""

    text: str
    complete: bool


class GrammarSize(TypedDict):
    """Size of a grammar as the backend gets it, and of its memory after a check."""

    bytes: int
    rules: int | None
    memory_bytes: int | None


class Explained(TypedDict):
    """Findings of a trial process about one constraint.

    `enforced`, `narrowed` and `refused` describe a schema; they are empty for other constraints.
    """

    enforced: list[Place]
    narrowed: list[Remark]
    refused: list[Remark]
    grammar: GrammarSize | None
    samples: list[SampleText]


_EXPLAIN = b'{"explain": '
"""First bytes of a job that is to be explained."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict, and what was found out about the constraint beside it."""

    verdict: TrialVerdict
    explained: Explained

    def to_bytes(self) -> bytes:
        """Return both as JSON."""
        verdict = self.verdict.to_bytes().decode()
        return json.dumps({"verdict": verdict, "explained": self.explained}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Explanation:
        """Return the explanation of `to_bytes`."""
        found = json.loads(data)
        return cls(TrialVerdict.from_bytes(found["verdict"].encode()), found["explained"])

    @classmethod
    def of_refusal(cls, verdict: TrialVerdict) -> Explanation:
        """Return the explanation of a constraint that was refused before its rewriting."""
        return cls(verdict, _nothing_known())


class SamplingTrial(Protocol):
    """A trial (`server.structured_outputs.trial_job.Trial`) that also generates texts."""

    def __call__(self, kind: str, text: str) -> list[str]:
        """Try one grammar."""
        ...

    def take_bytes(self) -> int | None:
        """Return the most memory of a grammar since the last call, in bytes; None if unknown."""
        ...

    def samples(
        self,
        kind: str,
        text: str,
        count: int,
        seed: int,
        *,
        most_tokens: int,
        most_s: float,
        words: Sequence[str],
    ) -> list[tuple[str, bool]]:
        """Return texts of a grammar, each with whether it is complete; `words` may be needed."""
        ...


def explain_bytes(constraint: Constraint, limits: SchemaLimits, seed: int) -> bytes:
    """Return the job that explains a constraint."""
    rest = job_bytes([constraint], limits)[1:]
    return _EXPLAIN + f"{seed}, ".encode() + rest


def answer_job(
    data: bytes,
    trial: SamplingTrial,
    *,
    compact: bool,
    specials: Mapping[str, int],
    on_shares: Callable[[int], None],
) -> bytes:
    """Return the verdict on a job or its explanation; see `do_job`."""
    rewritings: list[Rewriting] = []
    verdict = do_job(
        data,
        trial,
        compact=compact,
        specials=specials,
        on_shares=on_shares,
        on_rewriting=rewritings.append,
    )
    verdict = dataclasses.replace(verdict, memory_bytes=trial.take_bytes())
    if not data.startswith(_EXPLAIN):
        return verdict.to_bytes()
    job = json.loads(data)
    constraint = constraint_of(job["parts"][0])
    kind, text = constraint.kind.value, constraint.text
    found = _nothing_known()
    if constraint.kind is ConstraintKind.JSON:
        found |= _of_schema(constraint, verdict, rewritings)
    if verdict.reason is None:
        words = property_names(parsed(text)) if constraint.kind is ConstraintKind.JSON else []
        rewritten = verdict.grammar is not None
        text = verdict.grammar or text
        kind = ConstraintKind.GRAMMAR.value if rewritten else kind
        rules = len(_RULE.findall(text)) if kind == ConstraintKind.GRAMMAR.value else None
        found["grammar"] = {
            "bytes": len(text.encode()),
            "rules": rules,
            "memory_bytes": verdict.memory_bytes,
        }
        texts = trial.samples(
            kind,
            text,
            SAMPLES,
            job["explain"],
            most_tokens=SAMPLE_TOKENS,
            most_s=SAMPLE_S,
            words=words,
        )
        found["samples"] = [{"text": text, "complete": complete} for text, complete in texts]
    return Explanation(verdict, found).to_bytes()


def _of_schema(
    constraint: Constraint, verdict: TrialVerdict, rewritings: Sequence[Rewriting]
) -> Any:
    """Return the fields about a schema; only the reason for one that was never rewritten."""
    reason = [] if verdict.reason is None else [verdict.reason]
    if not rewritings:
        return {"refused": refused_places(reason)}
    schema = parsed(constraint.text)
    refused = refused_places(rewritings[0].left_out or reason)
    return {
        "enforced": enforced_places(schema, refused),
        "narrowed": narrowed_places(schema, constraint.undeclared),
        "refused": refused,
    }


def _nothing_known() -> Explained:
    return {"enforced": [], "narrowed": [], "refused": [], "grammar": None, "samples": []}
