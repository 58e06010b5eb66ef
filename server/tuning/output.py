"""Output of studies: text, JSON, environment lines, and values of the Helm chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from server.tuning.study import Seconds, Study

_UNITS = {"decode": "rows", "prefill": "tokens"}


def _text(studies: Sequence[Study]) -> str:
    return "".join(line + "\n" for study in studies for line in _lines(study))


def _json(studies: Sequence[Study]) -> str:
    return json.dumps([_report(study) for study in studies], indent=2) + "\n"


def _env(studies: Sequence[Study]) -> str:
    return "".join(
        f"# {study.work.name}\n" + "".join(f"{k}={v}\n" for k, v in _environment(study).items())
        for study in studies
    )


def _helm(studies: Sequence[Study]) -> str:
    return "---\n".join(
        f"# {study.work.name}\n" + yaml.safe_dump({"engine": {"env": _environment(study)}})
        for study in studies
    )


FORMATS: dict[str, Callable[[Sequence[Study]], str]] = {
    "text": _text,
    "json": _json,
    "env": _env,
    "helm": _helm,
}
"""Text; a JSON array; lines of an environment file; values for deploy/kubernetes/rbln-serve."""


def _environment(study: Study) -> dict[str, str]:
    sizes = {phase: ",".join(map(str, table)) for phase, table in study.suggested.items()}
    return {
        "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY": "manual",
        "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS": sizes["decode"],
        "VLLM_RBLN_PREFILL_CHUNK_BUCKETS": sizes["prefill"],
    }


def _lines(study: Study) -> Iterator[str]:
    yield study.work.name
    if study.work.left_out:
        yield f"  {study.work.left_out} requests exceed --max-model-len and are left out"
    for phase, change in study.changes.items():
        if not change.now.steps:
            yield f"  {phase}: nothing ran"
            continue
        now, then = list(change.current), list(change.suggested)
        padded = f"{change.now.padding:.1%} of the {_UNITS[phase]} are padding"
        yield f"  {phase}: {change.now.steps} steps, now {now}, {padded}"
        better = f"better {then}, {change.then.padding:.1%} padding"
        yield "    these are the best" if now == then else f"    {better}"
    yield (
        f"  {study.predicted.saving:.1%} less step time predicted, from {_source(study)} step times"
        f" ({study.predicted.gain:+.1%} throughput when busy)"
    )
    if (verified := study.verified) is not None:
        saved = f"{verified.saving:.1%} less step time measured"
        yield f"  {saved} ({verified.gain:+.1%} throughput)"
    yield "  to set it:"
    yield from (f"    {name}={value}" for name, value in _environment(study).items())


def _report(study: Study) -> dict[str, Any]:
    return {
        "name": study.work.name,
        **{phase: change.report() for phase, change in study.changes.items()},
        "predicted": _saved(study.predicted),
        "step_times": _source(study),
        "verified": study.verified and _saved(study.verified),
        "left_out": study.work.left_out,
        "environment": _environment(study),
    }


def _source(study: Study) -> str:
    return "recorded" if study.verified is None else "measured"


def _saved(seconds: Seconds) -> dict[str, float]:
    found = {
        "saving": seconds.saving,
        "throughput_gain": seconds.gain,
        "seconds_now": seconds.now,
        "seconds_then": seconds.then,
    }
    return {name: round(value, 4) for name, value in found.items()}
