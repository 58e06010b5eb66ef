"""Side of a vLLM engine: the CPU backend without our plug-in, or the RBLN path with it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from rbln_backend.host.child_process import Report
from rbln_backend.host.vllm_build import vllm_build
from rbln_backend.parity.job import Answer, FloatArray, IntArray, Job, SideResult
from rbln_backend.parity.runners.engines import Engine, OfflineEngine, start_engine
from rbln_backend.parity.runners.forced_tokens import FORCED_TOKENS
from rbln_backend.parity.runners.probe import probe
from rbln_backend.parity.runners.profile import profiled


def run(job: Job, report: Report) -> SideResult:
    """Generate freely, then follow the reference's tokens where the two differ."""
    report("engine", 0, 1)
    with closing(start_engine(job)) as engine:
        report("engine", 1, 1)
        return _run(engine, job, report)


def _run(engine: Engine, job: Job, report: Report) -> SideResult:
    side = _VllmSide(engine, job)
    side.warm_up()
    with profiled(job):
        started = time.perf_counter()
        free = side.generate(dict.fromkeys(range(len(job.prompts))), report, "generate")
        seconds = time.perf_counter() - started
    answers = side.follow(free, report)
    layers = None
    if job.probe is not None:
        assert isinstance(engine, OfflineEngine)
        layers = probe(engine, job.side, *job.probe)
    about = _about(engine)
    return SideResult(answers=tuple(answers), seconds=seconds, layers=layers, about=about)


def _about(engine: Engine) -> dict[str, Any]:
    return {
        "platform": type(current_platform).__name__,
        "vllm": vllm_build().version,
        "torch": torch.__version__,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "max_model_len": engine.model_config.max_model_len,
        "vocab_size": engine.model_config.get_vocab_size(),
    }


class _VllmSide:
    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._prompts: list[list[int]] = [engine.tokenizer(text).input_ids for text in job.prompts]

    def warm_up(self) -> None:
        """Run a request, so that one-time work is not in the measured time."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=2,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        count = self._engine.num_at_once
        self._engine.generate([self._prompts[0][:1]] * count, [params] * count)

    def generate(
        self, forced: Mapping[int, Sequence[int] | None], report: Report, what: str
    ) -> list[Answer]:
        """Return an answer for each prompt index; prompts with forced tokens follow them."""
        answers: list[Answer] = []
        indices, at_once = list(forced), self._engine.num_at_once
        for start in range(0, len(indices), at_once):
            part = indices[start : start + at_once]
            prompts = [self._prompts[index] for index in part]
            outputs = self._engine.generate(prompts, [self._params(forced[i]) for i in part])
            answers += map(self._answer, prompts, outputs)
            report(what, len(answers), len(forced))
        return answers

    def follow(self, free: Sequence[Answer], report: Report) -> list[Answer]:
        """Replace log-probabilities of answers that differ from the reference by forced ones."""
        away = {
            index: tokens
            for index, tokens in enumerate(self._job.forced or ())
            if tuple(free[index].token_ids) != tokens
        }
        answers = list(free)
        for index, along in zip(away, self.generate(away, report, "follow"), strict=True):
            answers[index] = replace(answers[index], top_ids=along.top_ids, logprobs=along.logprobs)
        return answers

    def _params(self, forced: Sequence[int] | None) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=self._job.max_tokens,
            ignore_eos=True,
            logprobs=self._job.num_logprobs or None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if forced is None else {FORCED_TOKENS: list(forced)},
        )

    def _answer(self, prompt: list[int], output: Any) -> Answer:
        completion = output.outputs[0]
        token_ids = np.array(completion.token_ids, dtype=np.int64)
        top_ids, logprobs = _top(completion.logprobs, len(token_ids))
        return Answer(
            prompt_ids=np.array(prompt, dtype=np.int64),
            token_ids=token_ids,
            text=self._engine.tokenizer.decode(completion.token_ids),
            top_ids=top_ids,
            logprobs=logprobs,
        )


def _top(flat: Any, positions: int) -> tuple[IntArray, FloatArray]:
    """Return the likeliest ids and log-probabilities [positions, N].

    vLLM lists the chosen token before the likeliest ones, which contain it again.
    """
    if flat is None:
        return np.zeros((positions, 0), np.int64), np.zeros((positions, 0), np.float32)
    ids = np.array(flat.token_ids, dtype=np.int64).reshape(positions, -1)[:, 1:]
    values = np.array(flat.logprobs, dtype=np.float32).reshape(positions, -1)[:, 1:]
    return ids, values
