"""Measured and verified studies, in a child process with its own engine.

The command writes a job to a file and reads the study from another one;
`python -m server.commands.tune_measuring JOB RESULT` is the child process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rbln_backend.api.settings import child_environ, given_options, options_of_vllm
from rbln_backend.errors import BucketError
from rbln_backend.host.child_process import ChildJob, report
from server.engine.config import engine_config
from server.settings import ServerSettings
from server.tuning.measure import compare_sizes, compare_trace, measure_alone, measure_trace
from server.tuning.replay import Player
from server.tuning.simulator import Tables, simulate
from server.tuning.sources import Work
from server.tuning.study import Seconds, Study, candidates, study

_TRIED = ("decode_batch_bucket", "prefill_chunk_buckets")
# Sets that differ by a smaller share of the measured time count as equal; the one that pads fewer
# rows is taken.
_SLACK = 0.01


class _Job(msgspec.Struct):
    argv: Sequence[str]
    work: Work
    limits: Mapping[str, int]
    candidates: Tables
    """The buckets to measure, with the present ones."""


class Measuring:
    """Studies on the engine of MODEL and vLLM's flags."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        """Raise `ValueError` for flags that set sizes, which the study varies."""
        self._timeout_s = timeout_s
        # vLLM's flags that depend on the buckets, or limit them.
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("max-num-seqs", "max-num-batched-tokens", "max-model-len"):
            parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default="")
        parser.add_argument("--additional-config", "--additional_config", default="{}")
        given, self._argv = parser.parse_known_args(argv)
        for name in ("max-num-seqs", "max-num-batched-tokens"):
            if getattr(given, name.replace("-", "_")):
                raise ValueError(f"--{name} follows from the buckets here; leave it out")
        self._context: str = given.max_model_len
        self._additional: dict[str, Any] = json.loads(given.additional_config)
        for name in given_options(self._additional):
            if name.startswith(_TRIED):
                raise ValueError(
                    f"--additional-config names {name}; leave it out, it is tried here"
                )

    def study(self, work: Work, limits: Mapping[str, int]) -> Study:
        """Return the best buckets of at most `limits` a phase, measured and verified.

        Raises `ChildError`, and `BucketError` where the model's context is too short for a bucket.
        """
        child = ChildJob(
            label="measuring",
            module=__name__,
            variables=child_environ(
                settings=True,
                VLLM_NO_USAGE_STATS="1",
                VLLM_PLUGINS="rbln",
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
            ),
            timeout=self._timeout_s,
        )
        tried = candidates(study(work, limits))
        job = _Job([*self._argv, *self.flags(tried)], work, limits, tried)

        def write(path: Path) -> None:
            path.write_bytes(msgspec.json.encode(job))

        return child.run(write, lambda path: msgspec.json.decode(path.read_bytes(), type=Study))

    def flags(self, tables: Tables) -> list[str]:
        """Return the flags of an engine with these buckets, which records no usage."""
        largest = tables["prefill"].largest
        if self._context.isdecimal() and int(self._context) < largest:
            raise BucketError(
                f"--max-model-len {self._context} is less than the prefill bucket {largest}; say "
                f"--prefill-buckets with sizes up to {self._context}"
            )
        ours = {
            "decode_batch_bucket_strategy": "manual",
            "decode_batch_bucket_manual_buckets": list(tables["decode"]),
            "prefill_chunk_buckets": list(tables["prefill"]),
            "record_usage": False,
        }
        config = options_of_vllm(self._additional) | {
            "rbln": given_options(self._additional) | ours
        }
        return [
            f"--additional-config={json.dumps(config)}",
            f"--max-num-seqs={tables['decode'].largest}",
            f"--max-num-batched-tokens={largest}",
            *([f"--max-model-len={self._context}"] if self._context else []),
        ]


def main() -> int:
    """Run the job that the command line names."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=_Job)
    report("engine", 0, 1)
    player = make_player(job.argv)
    found = _measured(job, player)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(found))
    player.shutdown()
    return 0


def make_player(argv: Sequence[str]) -> Player:
    """Return a player of the engine that MODEL and vLLM's flags describe."""
    from server.vllm.flags import parse_arguments

    settings = ServerSettings()
    _, config = engine_config(parse_arguments(list(argv), settings), settings, None)
    if config.parallel_config.data_parallel_size > 1:
        raise ValueError("one engine is measured: leave --data-parallel-size out")
    return Player(config)


def _measured(job: _Job, player: Player) -> Study:
    work = _that_fits(job.work, player.max_model_len)
    times, present = measure_alone(player, job.candidates), work.tables
    if work.requests:
        periods = simulate(work.requests, present, times, player.pace).periods
        times = measure_trace(player, job.candidates, present, periods, times)
    found = study(work, job.limits, times, player.pace, _SLACK)
    sets = (present, found.suggested)
    if work.requests:
        periods = simulate(work.requests, present, times, player.pace).periods
        return replace(found, verified=Seconds(*compare_trace(player, sets, periods)))
    counts = {phase: change.now.steps_by_size for phase, change in found.changes.items()}
    return replace(found, verified=Seconds(*compare_sizes(player, sets, counts)))


def _that_fits(work: Work, max_model_len: int) -> Work:
    fits = [r for r in work.requests if r.prompt_tokens + r.output_tokens <= max_model_len]
    if work.requests and not fits:
        raise BucketError(f"No request of {work.name} fits into {max_model_len} tokens")
    return replace(work, requests=fits, left_out=len(work.requests) - len(fits))


if __name__ == "__main__":
    sys.exit(main())
