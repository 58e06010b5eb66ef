"""Blocks of prompts that are copied from an NPU to host memory once the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rbln_backend.vllm_compat.kv_connector import yield_req_data
from rbln_backend.vllm_compat.surface import Request, SchedulerOutput


class UnsavedBlocks:
    """Collects the blocks of a request over the steps that compute its prompt."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], ...]] = {}

    def take(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> Iterator[tuple[str, tuple[list[int], ...]]]:
        """Yield id and blocks by group of each of ``requests`` whose last chunk ``output`` has."""
        for name, blocks, is_resumed in yield_req_data(output):
            request = requests.get(name)
            if request is None:
                continue
            if blocks is not None:
                self._add(name, blocks, is_new=is_resumed or name not in self._blocks)
            # The tokens of ``output`` are counted: our scheduler describes a step when it is whole.
            if request.num_computed_tokens >= request.num_prompt_tokens:
                yield name, self._blocks.pop(name)

    def forget(self, name: str) -> None:
        """Drop the blocks of a request that ended."""
        self._blocks.pop(name, None)

    def _add(self, name: str, blocks: tuple[list[int], ...], *, is_new: bool) -> None:
        """Add ``blocks``; a new or resumed request names all that it has."""
        if is_new:
            self._blocks[name] = tuple(list(group) for group in blocks)
            return
        for own, more in zip(self._blocks[name], blocks, strict=True):
            own.extend(more)
