"""Recomputes answers from the engine's inputs and compares the token ids.

The engine gets the prompt and parameters again. It generates as many tokens as the answer has,
without stop strings: these end an answer, and change no token before.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from server.vllm.engine_client import EngineClient


class SampledToken(NamedTuple):
    """A token with its text and its log-probability; None if the engine returns none."""

    id: int
    text: str
    logprob: float | None


class TokenDifference(NamedTuple):
    """First position of an answer whose token differs; `replayed` is None past the end."""

    position: int
    recorded: SampledToken
    replayed: SampledToken | None


class Recomputation:
    """Runs answers again on an engine."""

    def __init__(
        self,
        engine: EngineClient,
        name: str,
        *,
        priority: int = 0,
        extra_args: Mapping[str, Any] | None = None,
        is_salted: bool = False,
    ) -> None:
        """`name` begins the ids of the engine's requests, which have `priority` and `extra_args`.

        `is_salted`: no prompt reuses keys and values in the prefix cache, nor shares its own.
        """
        self._engine, self._name, self._priority = engine, name, priority
        self._extra_args, self._is_salted = dict(extra_args or {}), is_salted
        self._numbers = itertools.count()

    async def difference(
        self,
        prompt: list[int],
        params: Mapping[str, Any],
        output: list[int],
        adapter: LoRARequest | None,
    ) -> TokenDifference | None:
        """Return the first difference from `output`, None if all tokens are the same.

        `params` are sampling parameters as JSON values.
        """
        again = await self._last_output(prompt, _params(params, len(output)), adapter)
        replayed = list(again.token_ids)
        position = _first_difference(output, replayed)
        if position is None:
            return None
        ids = [output[position], *replayed[position : position + 1]]
        tokens = await self._scored([*prompt, *output[:position]], ids, adapter)
        return TokenDifference(position, tokens[0], tokens[1] if len(tokens) > 1 else None)

    async def _scored(
        self, prompt: list[int], ids: list[int], adapter: LoRARequest | None
    ) -> list[SampledToken]:
        """Return tokens with their log-probabilities after a prompt."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprob_token_ids=ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._last_output(prompt, params, adapter)
        found = output.logprobs[0] if output.logprobs else {}
        tokenizer = self._engine.renderer.tokenizer
        return [
            SampledToken(
                token,
                "" if tokenizer is None else tokenizer.decode([token]),
                found[token].logprob if token in found else None,
            )
            for token in ids
        ]

    async def _last_output(
        self, prompt: list[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> Any:
        """Return the completion of one request."""
        name = f"{self._name}-{next(self._numbers)}"
        params.extra_args = {**(params.extra_args or {}), **self._extra_args} or None
        salt = secrets.token_hex(16) if self._is_salted else None
        outputs = self._engine.generate(
            tokens_input(prompt, cache_salt=salt),
            params,
            name,
            lora_request=adapter,
            priority=self._priority,
        )
        # The parameters ask for one output, the last.
        async with aclosing(outputs) as stream:
            return (await anext(stream)).outputs[0]


def _params(recorded: Mapping[str, Any], num_tokens: int) -> SamplingParams:
    """Return the parameters that generate `num_tokens` tokens as those recorded do."""
    params = msgspec.json.decode(msgspec.json.encode(recorded), type=SamplingParams)
    params.n = 1
    params.stop = []
    params.max_tokens = num_tokens
    params.min_tokens = min(params.min_tokens, num_tokens)
    params.logprobs = params.prompt_logprobs = params.logprob_token_ids = None
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _first_difference(recorded: list[int], replayed: list[int]) -> int | None:
    """Return the first position where two lists differ, the shorter one's end included."""
    for position, token in enumerate(recorded):
        if position >= len(replayed) or replayed[position] != token:
            return position
    return None
