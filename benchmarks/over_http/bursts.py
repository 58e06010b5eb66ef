"""Write a trace of bursts of requests for ``rbln-serve tune --trace``.

``python -m benchmarks bursts > bursts.jsonl``. Bursts are those of agents that fan out: about five,
eleven or twenty questions at once about one document, with answers of similar length. Decode
batches then lie between powers of two, which are the default buckets.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence

_FANS, _SHARES = (5, 11, 20), (5, 3, 2)
_PROMPT_TOKENS, _OUTPUT_TOKENS = (24, 96), (56, 64)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks bursts", description=__doc__)
    parser.add_argument("--bursts", type=int, default=60, help="default: 60")
    parser.add_argument("--gap", type=float, default=0.4, help="mean seconds between (0.4)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for request in requests(args.bursts, args.gap, random.Random(args.seed)):
        sys.stdout.write(json.dumps(request) + "\n")
    return 0


def requests(bursts: int, gap_s: float, rng: random.Random) -> Iterator[dict[str, float]]:
    """Yield arrivals in seconds and lengths in tokens."""
    at = 0.0
    for _ in range(bursts):
        at += rng.expovariate(1.0 / gap_s)
        fan = rng.choices(_FANS, _SHARES)[0] + rng.randint(-1, 1)
        prompt = rng.randint(*_PROMPT_TOKENS)
        for _ in range(fan):
            yield {
                "arrival_s": round(at, 4),
                "prompt_tokens": prompt + rng.randint(0, 8),
                "output_tokens": rng.randint(*_OUTPUT_TOKENS),
            }
