"""Replays: what an engine of its own is asked to run, and the steps that it ran.

Both travel as files between processes; `server.tuning.replay` is the other one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rbln_backend.bucketing.usage import PHASES
from rbln_backend.errors import BucketError
from rbln_backend.reporting.child_process import ChildJob
from rbln_backend.scheduler.simulator import Pace, Request, Tables
from rbln_backend.settings import child_environ

_TRIED = ("decode_batch_bucket", "prefill_chunk_buckets")


class Step(NamedTuple):
    """One step that ran: `size` tokens of a chunk or rows of a batch.

    `seconds` are wall time, the scheduler and sampling included: what a request waits for.
    """

    phase: str
    size: int
    seconds: float


class Round(msgspec.Struct, frozen=True):
    """A busy period that runs to its end, in these buckets alone."""

    requests: Sequence[Request]
    tables: Tables


class ReplayJob(msgspec.Struct):
    """`argv` are MODEL and vLLM's flags; `order` names rounds, of which the first ones warm up."""

    argv: Sequence[str]
    rounds: Sequence[Round]
    order: Sequence[int]
    warm_up: int


class ReplayResult(msgspec.Struct):
    """What each round was every time, and what the engine says of itself."""

    ran: list[list[list[Step]]]
    max_model_len: int
    pace: Pace


class Replayer:
    """Runs rounds on engines that MODEL and vLLM's flags describe, each in its own process."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        """Raises `ValueError` where the flags name sizes, which are what is tried here."""
        self._timeout_s = timeout_s
        given, self._argv = _parser().parse_known_args(argv)
        for flag in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(given, flag) is not None:
                name = flag.replace("_", "-")
                raise ValueError(f"--{name} follows from the buckets here; leave it out")
        self._context: str = given.max_model_len
        if self._context:
            self._argv += ["--max-model-len", self._context]
        self._additional: dict[str, Any] = json.loads(given.additional_config)
        for name in self._additional.get("rbln", {}):
            if name.startswith(_TRIED):
                raise ValueError(
                    f"--additional-config names {name}; leave it out, it is tried here"
                )

    def run(
        self, label: str, rounds: Sequence[Round], order: Sequence[int], warm_up: int
    ) -> ReplayResult:
        """Run `rounds` in this order; the first `warm_up` of it are not in the result.

        Raises `ChildError`, and `BucketError` where the model's context is too short for a bucket.
        """
        child = ChildJob(
            label=label,
            module="server.tuning.replay",
            variables=child_environ(
                settings=True,
                VLLM_NO_USAGE_STATS="1",
                VLLM_PLUGINS="rbln",
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
            ),
            timeout=self._timeout_s,
        )
        job = ReplayJob([*self._argv, *self._flags(rounds)], rounds, order, warm_up)
        return child.run(
            lambda path: _write(path, job),
            lambda path: msgspec.json.decode(path.read_bytes(), type=ReplayResult),
        )

    def _flags(self, rounds: Sequence[Round]) -> list[str]:
        """All buckets of the rounds; what is only replayed is not recorded."""
        sizes = {
            phase: sorted({*chain.from_iterable(one.tables[phase] for one in rounds)})
            for phase in PHASES
        }
        largest = sizes["prefill"][-1]
        if self._context.isdecimal() and int(self._context) < largest:
            raise BucketError(
                f"--max-model-len {self._context} is less than the prefill bucket {largest}; say "
                f"--prefill-buckets with sizes up to {self._context}"
            )
        ours = {
            "decode_batch_bucket_strategy": "manual",
            "decode_batch_bucket_manual_buckets": sizes["decode"],
            "prefill_chunk_buckets": sizes["prefill"],
            "record_usage": False,
        }
        config = self._additional | {"rbln": self._additional.get("rbln", {}) | ours}
        return [
            *("--additional-config", json.dumps(config)),
            *("--max-num-seqs", str(sizes["decode"][-1])),
            *("--max-num-batched-tokens", str(largest)),
        ]


def _write(path: Path, job: ReplayJob) -> None:
    path.write_bytes(msgspec.json.encode(job))


def _parser() -> argparse.ArgumentParser:
    """Those of vLLM's flags that the buckets decide, or are decided by."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-num-seqs", "--max_num_seqs")
    parser.add_argument("--max-num-batched-tokens", "--max_num_batched_tokens")
    parser.add_argument("--max-model-len", "--max_model_len", default="")
    parser.add_argument("--additional-config", "--additional_config", default="{}")
    return parser
