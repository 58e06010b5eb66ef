"""Prompt logprobs, kept as the engine's tensors until the answer is serialised.

Until then a list of empty positions replaces them in vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from pydantic_core import to_json
from vllm.logprobs import Logprob
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from server.vllm.logprobs.late import SMALL_ENTRIES, LateParts, marker, slice_size

_CONTEXT = 4
"""Positions before a slice that vLLM reads to decode a character of several tokens."""


class Position(dict[int, Logprob]):
    """Placeholder for the logprobs of one position of a prompt."""

    def __init__(self, logprobs: TensorLogprobs, number: int) -> None:
        super().__init__()
        self.logprobs, self.number = logprobs, number


class TensorLogprobs:
    """The logprobs of one prompt, as the engine's tensors."""

    def __init__(self, processor: LogprobsProcessor, tensors: LogprobsTensors) -> None:
        self._tokenizer = processor.tokenizer
        self._number = processor.num_prompt_logprobs
        self._tensors = tensors
        self._length, self._entries = tensors.logprobs.shape

    @property
    def is_small(self) -> bool:
        """True for so few logprobs that they are made on the event loop."""
        return bool(self._length * self._entries <= SMALL_ENTRIES)

    def every(self) -> list[Any]:
        """Return the list that vLLM would make."""
        return [None, *(position for part in self.slices() for position in part)]

    def slices(self) -> Iterator[list[Any]]:
        """Yield the list that vLLM would make without its first None, a few positions at a time."""
        from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs

        scratch = LogprobsProcessor(
            tokenizer=self._tokenizer,
            logprobs=None,
            prompt_logprobs=[None],
            cumulative_logprob=None,
            num_logprobs=None,
            num_prompt_logprobs=self._number,
        )
        size = slice_size(self._entries)
        token_ids, logprobs, ranks, *_ = self._tensors
        for begin in range(0, self._length, size):
            rows = slice(begin, begin + size)
            scratch._update_prompt_logprobs(
                LogprobsTensors(token_ids[rows], logprobs[rows], ranks[rows])
            )
            assert isinstance(scratch.prompt_logprobs, list)
            made = scratch.prompt_logprobs[-len(logprobs[rows]) :]
            scratch.prompt_logprobs = scratch.prompt_logprobs[-_CONTEXT:]
            clamp_prompt_logprobs(made)
            yield made

    def positions(self, parts: LateParts) -> list[Any]:
        """Return placeholders, which `parts` replaces."""
        number = marker()
        first = {-number: Logprob(0.0, 0, "")}
        rest = [Position(self, index) for index in range(self._length)]
        snippet = to_json([first, *rest]).decode()
        parts.add(snippet, self._json)
        return [first, *rest]

    def _json(self) -> str:
        parts = [to_json(part, inf_nan_mode="null")[1:-1] for part in self.slices()]
        return (b"[" + b",".join([b"null", *parts]) + b"]").decode()


class LateLogprobs(LogprobsProcessor):
    """vLLM's logprobs processor of a request, which defers those of the prompt."""

    parts: LateParts

    @classmethod
    def of(cls, processor: LogprobsProcessor, parts: LateParts) -> LateLogprobs:
        """Return a replacement of vLLM's processor, before its first logprobs."""
        made = cls(**{field.name: getattr(processor, field.name) for field in fields(processor)})
        made.parts = parts
        return made

    def pop_prompt_logprobs(self) -> Any:
        """Return the prompt's logprobs, for every output of a stream.

        vLLM's processor returns them once. They are lost when that output is merged into a queued
        output of another choice.
        """
        return self.prompt_logprobs

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        made = TensorLogprobs(self, prompt_logprobs_tensors)
        self.prompt_logprobs = made.every() if made.is_small else made.positions(self.parts)


def resolved(positions: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the logprobs of positions in slices; those of the prompt are made slice by slice."""
    prompt = next((p.logprobs for p in positions if isinstance(p, Position)), None)
    begin = 0
    if prompt is not None:
        yield [None]
        begin = 1
        for part in prompt.slices():
            yield part
            begin += len(part)
    size = slice_size(max((len(p or ()) for p in positions[begin : begin + 1]), default=1))
    for start in range(begin, len(positions), size):
        yield list(positions[start : start + size])
