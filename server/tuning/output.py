"""What a study says: for people, as JSON, as environment lines, and as values of the Helm chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from rbln_backend.bucketing.usage import PHASES
from server.tuning.study import Study

_UNITS = {"decode": "rows", "prefill": "tokens"}


def to_text(studies: Sequence[Study]) -> str:
    """For people."""
    return "".join(line + "\n" for study in studies for line in _lines(study))


def to_json(studies: Sequence[Study]) -> str:
    """One array, an object each."""
    return json.dumps([_report(study) for study in studies], indent=2) + "\n"


def to_env(studies: Sequence[Study]) -> str:
    """Lines of an environment file; what they are of stands above them."""
    lines = []
    for study in studies:
        lines += [f"# {study.work.name}", *(f"{k}={v}" for k, v in _environment(study).items())]
    return "\n".join(lines) + "\n"


def to_helm(studies: Sequence[Study]) -> str:
    """Values for deploy/kubernetes/rbln-serve: `helm upgrade -f`."""
    documents = [
        f"# {study.work.name}\n" + yaml.safe_dump({"engine": {"env": _environment(study)}})
        for study in studies
    ]
    return "---\n".join(documents)


FORMATS: dict[str, Callable[[Sequence[Study]], str]] = {
    "text": to_text,
    "json": to_json,
    "env": to_env,
    "helm": to_helm,
}


def _environment(study: Study) -> dict[str, str]:
    sizes = {phase: ",".join(map(str, study.suggested[phase])) for phase in PHASES}
    return {
        "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY": "manual",
        "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS": sizes["decode"],
        "VLLM_RBLN_PREFILL_CHUNK_BUCKETS": sizes["prefill"],
    }


def _lines(study: Study) -> list[str]:
    lines = [study.work.name]
    if study.work.left_out:
        lines.append(f"  {study.work.left_out} requests exceed --max-model-len and are left out")
    for phase in PHASES:
        steps = sum(study.counts[phase].values())
        if not steps:
            lines.append(f"  {phase}: nothing ran")
            continue
        now, then = list(study.work.tables[phase]), list(study.suggested[phase])
        lines.append(
            f"  {phase}: {steps} steps, now {now}, {study.padding_now[phase]:.1%} of the "
            f"{_UNITS[phase]} are padding"
        )
        better = f"better {then}, {study.padding_then[phase]:.1%} padding"
        lines.append("    these are the best" if now == then else f"    {better}")
    source = "measured" if study.measured else "recorded"
    lines.append(
        f"  {study.saving:.1%} less step time predicted, from {source} step times "
        f"({_gain(study.saving):+.1%} throughput when busy)"
    )
    if study.verified is not None:
        saving = study.verified.saving
        lines.append(f"  {saving:.1%} less step time measured ({_gain(saving):+.1%} throughput)")
    lines.append("  to set it:")
    lines += [f"    {name}={value}" for name, value in _environment(study).items()]
    return lines


def _report(study: Study) -> dict[str, Any]:
    phases = {
        phase: {
            "steps": sum(study.counts[phase].values()),
            "current": list(study.work.tables[phase]),
            "suggested": list(study.suggested[phase]),
            "padding_now": round(study.padding_now[phase], 4),
            "padding_then": round(study.padding_then[phase], 4),
        }
        for phase in PHASES
    }
    verified = study.verified
    return {
        "name": study.work.name,
        **phases,
        "predicted": _savings(study.saving, study.seconds_now, study.seconds_then),
        "step_times": "measured" if study.measured else "recorded",
        "verified": None
        if verified is None
        else {
            "saving": round(verified.saving, 4),
            "throughput_gain": round(_gain(verified.saving), 4),
            "seconds_now": verified.now_s,
            "seconds_then": verified.then_s,
        },
        "left_out": study.work.left_out,
        "environment": _environment(study),
    }


def _savings(saving: float, now: float, then: float) -> dict[str, float]:
    return {
        "saving": round(saving, 4),
        "throughput_gain": round(_gain(saving), 4),
        "seconds_now": round(now, 4),
        "seconds_then": round(then, 4),
    }


def _gain(saving: float) -> float:
    """More steps in the same time."""
    return 1.0 / (1.0 - saving) - 1.0
