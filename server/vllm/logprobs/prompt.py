"""Prompt logprobs of streams with several answers."""

from __future__ import annotations

from dataclasses import fields

from vllm.logprobs import PromptLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor


class LastingPromptLogprobs(LogprobsProcessor):
    """vLLM's logprobs processor of a request, which returns those of the prompt every time."""

    @classmethod
    def of(cls, processor: LogprobsProcessor) -> LastingPromptLogprobs:
        """Return a replacement of vLLM's processor, before its first logprobs."""
        return cls(**{field.name: getattr(processor, field.name) for field in fields(processor)})

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the prompt's logprobs, for every output of a stream.

        vLLM's processor returns them once. They are lost when that output is merged into a queued
        output of another choice.
        """
        return self.prompt_logprobs
