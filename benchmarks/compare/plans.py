"""Amount of measurement by model size: enough for a median in acceptable time.

On the 2-core machine without bfloat16 instructions vLLM's CPU backend takes about a second for one
decode step of 1.2 billion parameters, so every cell has a time budget, after which it is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONCURRENCY = (1, 8, 32)
SERIAL_CONCURRENCY = (1, 8)
DECODE_BATCHES = (1, 8, 32, 64)
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 128
MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rounds, lengths in tokens and budgets in seconds.

    `peer_concurrency` is for other batching servers than ours; `min_requests` for low concurrency,
    where one request is too short to time; `warm_starts` counts the one that serves the load.
    `chunk_tokens` is the prefill chunk of both vLLM flavours; None leaves each its default.
    """

    rounds: int
    step_tokens: int
    step_budget_s: float
    prefill_tokens: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    min_requests: int
    http_budget_s: float
    serial_budget_s: float
    peer_concurrency: tuple[int, ...]
    warm_starts: int
    minutes: dict[str, float]
    chunk_tokens: int | None = None

    def quick(self) -> Plan:
        """Return the plan of a look: one round, one start, small budgets."""
        return replace(
            self,
            rounds=1,
            warm_starts=1,
            step_budget_s=min(4.0, self.step_budget_s),
            http_budget_s=min(4.0, self.http_budget_s),
            serial_budget_s=min(3.0, self.serial_budget_s),
            minutes={part: minutes / 3 for part, minutes in self.minutes.items()},
        )


_SMALL = Plan(
    rounds=3,
    step_tokens=OUTPUT_TOKENS,
    step_budget_s=5.0,
    prefill_tokens=(128, 512),
    mixed_tokens=(16, 40, 72, 130, 200),
    min_requests=8,
    http_budget_s=6.0,
    serial_budget_s=4.0,
    peer_concurrency=CONCURRENCY,
    warm_starts=3,
    minutes={"steps": 1.0, "cold": 1.5, "http": 4.5},
)
_MEDIUM = replace(
    _SMALL,
    step_budget_s=6.0,
    min_requests=2,
    http_budget_s=12.0,
    serial_budget_s=8.0,
    warm_starts=2,
    minutes={"steps": 1.5, "cold": 3.0, "http": 7.0},
)
_LARGE = replace(
    _MEDIUM,
    rounds=2,
    step_tokens=48,
    step_budget_s=16.0,
    prefill_tokens=(128, 256),
    mixed_tokens=(16, 40, 72, 130),
    min_requests=1,
    http_budget_s=45.0,
    serial_budget_s=12.0,
    peer_concurrency=SERIAL_CONCURRENCY,
    warm_starts=1,
    # Ours by default. With its own 2,048 vLLM's CPU backend computes for minutes at each start.
    chunk_tokens=256,
    minutes={"steps": 3.0, "cold": 3.5, "http": 10.0},
)


def plan_for(parameters: int) -> Plan:
    """Return the plan of a model of that many parameters."""
    if parameters < 50_000_000:
        return _SMALL
    return _MEDIUM if parameters < 500_000_000 else _LARGE
