"""Side of a vLLM engine: the CPU backend without our plug-in, or the RBLN path with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rbln_backend.host.processes import Report
from rbln_backend.host.resources import vllm_build
from rbln_backend.parity.jobs import Answer, FloatArray, IntArray, Job, Layers, Side, SideResult
from rbln_backend.parity.layers import profiled, tapped

FORCED_TOKENS = "forced_tokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Follows ``SamplingParams.extra_args["forced_tokens"]`` of requests that have it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], Tensor], Tensor] | None:
        """Return the processor of a request's logits [V]; None without forced tokens."""
        forced: list[int] | None = (params.extra_args or {}).get(FORCED_TOKENS)
        if forced is None:
            return None

        def follow(output_ids: list[int], logits: Tensor) -> Tensor:
            """Set ``logits`` [V] so that the next forced token is chosen."""
            logits.fill_(float("-inf"))
            logits[forced[len(output_ids)]] = 0.0
            return logits

        return follow


class OfflineEngine:
    """vLLM's ``LLM``, whose first rank is in this process, so that its layers are accessible."""

    def __init__(self, job: Job) -> None:
        self.llm = LLM(job.model, logits_processors=[ForcedTokens], **job.engine_args)
        self.model_config = self.llm.model_config
        self.tokenizer: Any = self.llm.get_tokenizer()
        self.num_at_once = int(job.engine_args["max_num_seqs"])
        """Requests that run at the same time, over all ranks."""
        self._lora = _adapter(job)

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: Any = self.llm.generate(
            inputs, list(params), use_tqdm=False, lora_request=self._lora
        )
        return list(outputs)

    def close(self) -> None:
        """Do nothing: the engine ends with this process."""


class RankedEngine:
    """vLLM's ``AsyncLLM``, because ``LLM`` drives one engine and each data-parallel rank is one.

    Prompts go to the ranks in turn, so that every rank is compared.
    """

    def __init__(self, job: Job, ranks: int) -> None:
        self._ranks = ranks
        self._lora = _adapter(job)
        self._number = 0
        # The engine's tasks run in this loop, only during calls.
        self._runner = asyncio.Runner()
        args = AsyncEngineArgs(model=job.model, logits_processors=[ForcedTokens], **job.engine_args)

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(args)

        self._engine = self._runner.run(start())
        self.model_config = self._engine.model_config
        self.tokenizer: Any = self._engine.get_tokenizer()
        self.num_at_once = int(job.engine_args["max_num_seqs"]) * ranks

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        return self._runner.run(self._all(prompts, params))

    def close(self) -> None:
        self._engine.shutdown()
        self._runner.close()

    async def _all(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        jobs = [
            self._one(index % self._ranks, prompt, how)
            for index, (prompt, how) in enumerate(zip(prompts, params, strict=True))
        ]
        return await asyncio.gather(*jobs)

    async def _one(self, rank: int, prompt: list[int], params: SamplingParams) -> RequestOutput:
        self._number += 1
        outputs = self._engine.generate(
            {"prompt_token_ids": prompt},
            params,
            request_id=f"parity-{self._number}",
            lora_request=self._lora,
            data_parallel_rank=rank,
        )
        # FINAL_ONLY: there is one.
        return [output async for output in outputs][-1]


def _adapter(job: Job) -> LoRARequest | None:
    return None if job.lora is None else LoRARequest("parity", 1, job.lora)


Engine: TypeAlias = OfflineEngine | RankedEngine


def probe(engine: OfflineEngine, side: Side, token_ids: Sequence[int], num_decoded: int) -> Layers:
    """Return the states of every layer over ``token_ids``; the last ones run as decode steps."""
    split = len(token_ids) - num_decoded
    # The engine also generates the token after the last one, which is ignored.
    forced = [*token_ids[split:], token_ids[-1]]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_decoded + 1,
        ignore_eos=True,
        detokenize=False,
        extra_args={FORCED_TOKENS: forced},
    )
    prompt = list(token_ids[:split])
    if side == "rbln":
        engine.llm.collective_rpc("start_probe")
        engine.generate([prompt], [params])
        names, states = engine.llm.collective_rpc("take_probe")[0]
    else:
        # The reference runs eagerly, with hooks on its layers.
        taken: list[Tensor] = []
        model: Any = engine.llm.apply_model(_itself)[0]
        with tapped(model, lambda state: taken.append(state.detach().float().clone())) as names:
            engine.generate([prompt], [params])
        rows = [state.reshape(-1, state.shape[-1]) for state in taken]
        states = [torch.cat(rows[index :: len(names)]).numpy() for index in range(len(names))]
    return Layers(names=tuple(names), states=np.stack(states)[:, : len(token_ids)])


def _itself(model: Any) -> Any:
    return model


def run(job: Job, report: Report) -> SideResult:
    """Generate freely, then follow the reference's tokens where the two differ."""
    report("engine", 0, 1)
    ranks = int(job.engine_args.get("data_parallel_size", 1))
    engine: Engine = OfflineEngine(job) if ranks == 1 else RankedEngine(job, ranks)
    with closing(engine):
        report("engine", 1, 1)
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
        about = {
            "platform": type(current_platform).__name__,
            "vllm": vllm_build().version,
            "torch": torch.__version__,
            "dtype": str(engine.model_config.dtype).removeprefix("torch."),
            "max_model_len": engine.model_config.max_model_len,
            "vocab_size": engine.model_config.get_vocab_size(),
        }
        return SideResult(answers=tuple(answers), seconds=seconds, layers=layers, about=about)


class _VllmSide:
    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._prompts: list[list[int]] = [engine.tokenizer(text).input_ids for text in job.prompts]

    def warm_up(self) -> None:
        """Run a request, so that one-time work is not in the measured time."""
        params = SamplingParams(
            temperature=0.0, max_tokens=2, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
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
