"""Replay of audited answers: the same token ids again, or the first position that differs.

A replay sends the engine the recorded prompt and parameters. It generates as many tokens as the
answer has, without stop strings: these end an answer, and change no token before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from server.errors import ServerError
from server.vllm.auditing.answers import digest_or_none

if TYPE_CHECKING:
    from server.lora.registry import AdapterRegistry
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


class ReplayError(Exception):
    """An answer that cannot be replayed, and why."""


class Replay:
    """Runs recorded answers on an engine."""

    def __init__(self, engine: EngineClient, adapters: AdapterRegistry | None) -> None:
        """`adapters` is the engine's registry, None without LoRA."""
        self._engine, self._adapters = engine, adapters
        self._requests = itertools.count()
        # By the digest of their weights: a name may stand for other weights later.
        self._loaded: dict[str, LoRARequest] = {}
        # Answers run together, and the first loads the adapter of all.
        self._loading = asyncio.Lock()

    async def run(self, record: Mapping[str, Any]) -> TokenDifference | None:
        """Return the first difference from a record, None if all tokens are the same.

        Raises `ReplayError` for a record without tokens and for an absent adapter.
        """
        if record.get("other_inputs"):
            raise ReplayError("its prompt has inputs besides tokens")
        if not isinstance(record["output"], list):
            raise ReplayError("it has digests only (--audit-content digest)")
        adapter = await self._adapter(record["adapter"])
        prompt, recorded = record["prompt"], record["output"]
        params = _params(record["params"], len(recorded))
        replayed = await self._generate(prompt, params, adapter)
        position = _first_difference(recorded, replayed)
        if position is None:
            return None
        ids = [recorded[position], *replayed[position : position + 1]]
        tokens = await self._scored([*prompt, *recorded[:position]], ids, adapter)
        return TokenDifference(position, tokens[0], tokens[1] if len(tokens) > 1 else None)

    async def _generate(
        self, prompt: list[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> list[int]:
        return list((await self._last_output(prompt, params, adapter)).token_ids)

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
        name = f"replay-{next(self._requests)}"
        outputs = self._engine.generate(tokens_input(prompt), params, name, lora_request=adapter)
        # The parameters ask for one output, the last.
        async with aclosing(outputs) as stream:
            return (await anext(stream)).outputs[0]

    async def _adapter(self, recorded: Mapping[str, Any] | None) -> LoRARequest | None:
        """Return the adapter of a record, which is loaded at its first use."""
        if recorded is None:
            return None
        name, path, digest = recorded["name"], recorded["path"], recorded["digest"]
        if self._adapters is None:
            raise ReplayError(f"its adapter {name!r} needs --enable-lora")
        async with self._loading:
            if digest not in self._loaded:
                self._loaded[digest] = await self._load(self._adapters, name, path, digest)
        return self._loaded[digest]

    async def _load(
        self, adapters: AdapterRegistry, name: str, path: str, digest: str
    ) -> LoRARequest:
        ready = (a for a in adapters.ready() if digest_or_none(a.path) == digest)
        if (found := next(ready, None)) is None:
            here = digest_or_none(path)
            if here != digest:
                what = "has no weights here" if here is None else f"has other weights here: {here}"
                raise ReplayError(f"its adapter {name!r} at {path} {what}; recorded: {digest}")
            alias = f"replay-{digest[:16]}"
            try:
                await adapters.load_static(alias, path, next(iter(adapters.limits.reserved_names)))
            except ServerError as error:
                raise ReplayError(f"its adapter {name!r}: {error.message}") from error
            found = adapters.get(alias)
        return LoRARequest(found.name, found.id, found.path)


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
