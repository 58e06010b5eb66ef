"""Our engine over the SDK's double: jobs, their answers, and the double's log of calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tests.engine.script import run_script
from tests.engine.support import make_prompts
from tests.graph_cache import graph_cache
from tests.reference import reference_generate
from tests.sdk_double.launch import FOLDER, double_environment, read_log

SCRIPT = Path(__file__).with_name("engine_script.py")

# A chunk is an eighth of a block, a longest request four blocks.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 24,
    "seed": 0,
    "disable_log_stats": True,
}
ONE_CHUNK, TWO_BLOCKS, THREE_CHUNKS, WHOLE_CHUNK = make_prompts([90, 1500, 300, 128], seed=7)
SHARED = TWO_BLOCKS[:600] + ONE_CHUNK
"""Begins as ``TWO_BLOCKS`` does, and ends inside the first block."""
BATCHES = [[ONE_CHUNK], [ONE_CHUNK, TWO_BLOCKS, THREE_CHUNKS, WHOLE_CHUNK], [SHARED]]


@dataclass(frozen=True)
class Job:
    """One engine's life."""

    checkpoint: Path
    options: dict[str, Any] = field(default_factory=dict)
    batches: Sequence[Sequence[list[int]]] = field(default_factory=lambda: BATCHES)
    max_tokens: int = 8
    abort_after: int | None = None
    """The steps after which the first request of each batch is aborted."""
    reference: Path | None = None
    """A checkpoint of the same values that transformers reads; None: the same one."""
    seed: int | None = None
    """Of sampled tokens; None: the most probable ones."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """More fields of ``SamplingParams``."""
    checks_all_drafts: bool = False
    """As many as there are, whatever they gain."""
    reads: str | None = None
    """``early`` or ``late``: the runner is broken so that it reads a step's outputs then."""
    adapters: Sequence[Sequence[Path | None]] = ()
    """Of the prompts of each batch; none where it is empty."""
    wrong_adapters: str | None = None
    """What is done wrong with them: ``mask``, ``slot`` or ``weights``."""
    coming_adapter: Path | None = None
    """One that is loaded and unloaded between steps."""
    cache_scales: tuple[tuple[float, float], ...] = ()
    """Of keys and values by layer, in a cache of e4m3; none in another."""

    def expected(self) -> list[list[list[int]]]:
        path = self.reference or self.checkpoint
        return [
            [
                reference_generate(
                    path, prompt, self.max_tokens, cache_scales=self.cache_scales
                ).token_ids
                for prompt in batch
            ]
            for batch in self.batches
        ]


@dataclass(frozen=True)
class Ran:
    """Results of jobs in one process."""

    answers: list[list[list[list[int]]]]
    log: Path

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Return the double's log of one kind of call, in all processes."""
        return read_log(self.log, name)


def run(
    jobs: Sequence[Job],
    folder: Path,
    *,
    rbln: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **double: Any,
) -> Ran:
    """Run ``jobs`` in a new process with its log under ``folder``; ``double`` sets it up."""
    fields = [
        {
            "batches": job.batches,
            "max_tokens": job.max_tokens,
            "abort_after": job.abort_after,
            "seed": job.seed,
            "sampling": dict(job.sampling),
            "checks_all_drafts": job.checks_all_drafts,
            "reads": job.reads,
            "wrong_adapters": job.wrong_adapters,
            "coming_adapter": None if job.coming_adapter is None else str(job.coming_adapter),
            "adapters": [[None if a is None else str(a) for a in own] for own in job.adapters],
        }
        for job in jobs
    ]
    return Ran(*run_lives(SCRIPT, jobs, fields, folder, rbln, environment, **double))


def beside(bundle: Path, folder: Path) -> dict[str, Any]:
    """Return settings of engines that find graphs in ``bundle`` alone, as on another host."""
    return {"cache_root": str(folder / "cache"), "cache_bundles": [str(bundle)]}


def _graphs_of(options: dict[str, Any]) -> Path:
    """Return the cache root that runs with ``options`` share, kept as ``graph_cache`` is.

    Binaries depend on the number of blocks, which the key of an engine's graphs does not have.
    """
    blocks = options["num_gpu_blocks_override"]
    return graph_cache() / f"npu-{_double_digest()}" / f"blocks-{blocks}"


@cache
def _double_digest() -> str:
    """Return the digest of the double, whose ops give shapes to what is captured."""
    digest = hashlib.sha256()
    for file in sorted((FOLDER / "rebel").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


class Life(Protocol):
    @property
    def checkpoint(self) -> Path: ...

    @property
    def options(self) -> dict[str, Any]: ...


def run_lives(
    script: Path,
    lives: Sequence[Life],
    fields: Sequence[dict[str, Any]],
    folder: Path,
    rbln: dict[str, Any] | None,
    environment: dict[str, str] | None,
    **double: Any,
) -> tuple[list[Any], Path]:
    """Return what ``script`` prints of each life with its ``fields``, and the double's log."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"calls-{len(list(folder.glob('calls-*')))}.jsonl"
    request = []
    for life, own in zip(lives, fields, strict=True):
        options = OPTIONS | life.options
        settings = {"cache_root": str(_graphs_of(options))} | (rbln or {})
        options = {"additional_config": {"rbln": settings}} | options
        request.append({"path": str(life.checkpoint), "options": options, **own})
    variables = double_environment(log, **double) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return run_script(script, request, variables | (environment or {}), timeout_s=900), log
