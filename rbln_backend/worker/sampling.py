"""Sampling on the host: vLLM's sampler with kernels, grammar masks, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from rbln_backend.config import NO_TOKEN
from rbln_backend.core import StepOutputs
from rbln_backend.devices.emulated.kernel_set import Recording, native_library, start_recording
from rbln_backend.reports.metrics import MetricsBoard


class RowSampler(Sampler):
    """Upstream's sampler with the log-probabilities that each request has parameters for.

    If one request of a step has ``logprob_token_ids``, upstream returns the columns of these tokens
    to all requests, instead of their likeliest tokens.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_likeliest: int | None = None
        self._latest: SamplingMetadata | None = None
        self._has_no_edits = False

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample from logits [rows, V] as upstream."""
        self._num_likeliest = sampling_metadata.max_num_logprobs
        return super().forward(logits, sampling_metadata, *args, **options)

    def sample(self, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """As upstream, from logits [rows, V] with their edits.

        Rows in which every token is forbidden get ``NO_TOKEN``; upstream returns token 0.
        """
        sampled, processed = self._sample_rows(logits, *args, **options)
        # Where all are forbidden, the one that was taken is, too.
        logit = logits.gather(1, sampled.view(-1, 1).long()).view(-1)
        return sampled.masked_fill(logit == -torch.inf, NO_TOKEN), processed

    def _sample_rows(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        drawn: tuple[Tensor, Tensor | None] = super().sample(*args, **options)
        return drawn

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Gather as upstream; for ``NO_TOKEN``, whose row is not returned, those of token 0."""
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids.clamp(min=0))

    def gather_specific_token_logprobs(
        self, logprobs: Tensor, logprob_token_ids: dict[int, list[int]], sampled: Tensor
    ) -> LogprobsTensors | None:
        """Gather as upstream; rows without ``logprob_token_ids`` get their likeliest tokens.

        ``logprobs`` [rows, V], ``sampled`` [rows].
        """
        sampled = sampled.clamp(min=0)
        named = logprob_token_ids
        if self._num_likeliest:
            likeliest = logprobs.topk(self._num_likeliest).indices.tolist()
            named = dict(enumerate(likeliest)) | named
        return super().gather_specific_token_logprobs(logprobs, named, sampled)

    def takes_largest(self, metadata: SamplingMetadata) -> bool:
        return metadata.all_greedy and self.takes_logits_alone(metadata)

    def takes_logits_alone(self, metadata: SamplingMetadata) -> bool:
        """Return True if no request changes logits before they are sampled, or reports any."""
        if metadata is not self._latest:
            # A batch keeps its metadata until a request joins or leaves.
            self._latest = metadata
            self._has_no_edits = _has_no_edits(metadata)
        if not self._has_no_edits:
            return False
        for processor in metadata.logitsprocs.non_argmax_invariant:
            # A bias, or a minimum length that has not been reached.
            if isinstance(processor, LogitBiasLogitsProcessor):
                if processor.biases:
                    return False
            elif isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
                return False
        return True


class GreedySampler(RowSampler):
    """A ``RowSampler`` that takes the largest logit of each row in a kernel where that is all.

    Upstream copies the logits to float32 first, which does not change their order.
    """

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample from logits [rows, V] as upstream."""
        if args or options or not self.takes_largest(sampling_metadata):
            return super().forward(logits, sampling_metadata, *args, **options)
        sampled = torch.ops.rbln_emulator.greedy(logits)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)


def _has_no_edits(metadata: SamplingMetadata) -> bool:
    """Return True if no parameter but a bias or a minimum length changes or reports logits."""
    return (
        metadata.no_penalties
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and metadata.thinking_budget_state_holder is None
        and all(
            isinstance(processor, LogitBiasLogitsProcessor | MinTokensLogitsProcessor)
            for processor in metadata.logitsprocs.non_argmax_invariant
        )
    )


def with_generators(metadata: SamplingMetadata, rows: Sequence[int]) -> SamplingMetadata:
    """Return the metadata with the generators of ``rows`` alone: others do not advance."""
    if metadata.generators.keys() <= set(rows):
        return metadata
    generators = {row: generator for row, generator in metadata.generators.items() if row in rows}
    return replace(metadata, generators=generators)


class KernelSampler(GreedySampler):
    """A ``GreedySampler`` with kernels for draws, penalties and log-probabilities, on every core.

    A draw takes 64 random bits of its request's generator, or of torch's own for requests without a
    seed: the same seed gives the same tokens in any company. vLLM's code draws where a processor of
    a plug-in takes part.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._outputs = OutputTokens()

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample from logits [rows, V] as upstream."""
        metadata = sampling_metadata
        if args or options:
            return super().forward(logits, metadata, *args, **options)
        is_raw = metadata.max_num_logprobs != -1 and "raw" in self.logprobs_mode
        if is_raw and _has_reports(metadata):
            return self._sample_and_report(logits, metadata)
        if metadata.all_greedy or not (
            self.takes_logits_alone(metadata) and self._draws_here(metadata)
        ):
            return super().forward(logits, metadata)
        # Without upstream's copy in float32.
        return SamplerOutput(sampled_token_ids=_draw(logits, metadata), logprobs_tensors=None)

    # Upstream calls its static function as a method.
    def apply_penalties(  # type: ignore[override]
        self, logits: Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> Tensor:
        """Return float32 logits [rows, V] with the penalties, changed in place."""
        metadata = sampling_metadata
        if not metadata.no_penalties:
            torch.ops.rbln_emulator.penalize_(
                logits,
                metadata.prompt_token_ids,
                *self._outputs.joined(output_token_ids),
                metadata.presence_penalties,
                metadata.frequency_penalties,
                metadata.repetition_penalties,
            )
        return logits

    def _sample_rows(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Draw from logits [rows, V]: int32 [rows], and processed values if any are returned."""
        metadata = sampling_metadata
        if args or options or not self._draws_here(metadata):
            return super()._sample_rows(logits, metadata, *args, **options)
        drawn = (
            torch.ops.rbln_emulator.greedy(logits)
            if metadata.all_greedy
            else _draw(logits, metadata)
        ).view(-1)
        if "processed" not in self.logprobs_mode or not _has_reports(metadata):
            return drawn, None
        # vLLM's own draws are dropped, and advance no request's generator.
        _, processed = super()._sample_rows(logits, replace(metadata, generators={}))
        return drawn, processed

    def _sample_and_report(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        silent = replace(metadata, max_num_logprobs=None, logprob_token_ids=None)
        raw = logits
        is_kept = self.takes_logits_alone(silent) and self._draws_here(silent)
        if logits.dtype == torch.float32 and not is_kept:
            # Upstream changes logits of this type in place.
            raw = logits.clone()
        sampled = self.forward(logits, silent).sampled_token_ids
        is_normalized = self.logprobs_mode == "raw_logprobs"
        reported = LogprobsTensors(
            *torch.ops.rbln_emulator.top_logprobs(
                raw, sampled.view(-1).clamp(min=0), metadata.max_num_logprobs or 0, is_normalized
            )
        )
        if metadata.logprob_token_ids:
            reported = _with_named(reported, raw, metadata.logprob_token_ids, is_normalized)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=reported)

    def _draws_here(self, metadata: SamplingMetadata) -> bool:
        """Return True if the kernel knows everything that takes part in the draw."""
        return all(
            type(processor) is MinPLogitsProcessor
            for processor in metadata.logitsprocs.argmax_invariant
        )


def _has_reports(metadata: SamplingMetadata) -> bool:
    """Return True if a request has log-probabilities, or logits in their place."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def _with_named(
    reported: LogprobsTensors, logits: Tensor, named: dict[int, list[int]], is_normalized: bool
) -> LogprobsTensors:
    """Replace the likeliest tokens of rows of logits [rows, V] by those that requests name.

    The same kernel makes the values, so that no other row's depend on them.
    """
    rows, count = reported.logprobs.shape
    width = max(count, *(1 + len(tokens) for tokens in named.values()))
    ids = torch.zeros(rows, width, dtype=torch.int32)
    values = torch.full((rows, width), -torch.inf)
    ids[:, :count], values[:, :count] = reported.logprob_token_ids, reported.logprobs
    for row, tokens in named.items():
        ids[row, 1:], values[row, 1:] = 0, -torch.inf
        token_ids = torch.tensor(tokens, dtype=torch.int32)
        _, of_own, _ = torch.ops.rbln_emulator.top_logprobs(
            logits[row].expand(len(token_ids), -1), token_ids, 0, is_normalized
        )
        ids[row, 1 : 1 + len(token_ids)], values[row, 1 : 1 + len(token_ids)] = (
            token_ids,
            of_own.view(-1),
        )
    return LogprobsTensors(ids, values, reported.selected_token_ranks)


def _draw(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Draw a token of each row of logits [rows, V]: int32 [rows, 1]."""
    min_p: Tensor | None = None
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            min_p = processor.min_p.view(-1)
    # 64 random bits for each row; generators of requests advance by one draw.
    randoms = torch.empty(logits.shape[0], dtype=torch.int64).random_(-(2**63), None)
    for row, generator in metadata.generators.items():
        randoms[row : row + 1].random_(-(2**63), None, generator=generator)
    drawn: Tensor = torch.ops.rbln_emulator.sample(
        logits, metadata.temperature, metadata.top_k, metadata.top_p, min_p, randoms
    )
    return drawn


# Lists that are kept beside those of a step: another batch may have its turn in between.
_OTHERS = 16


@dataclass(slots=True)
class _Copy:
    """A request's list, which only grows, and its tokens so far."""

    source: list[int]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(64, dtype=np.int32))
    count: int = 0

    def updated(self) -> NDArray[np.int32]:
        """Return the tokens [len(source)]."""
        count, known = len(self.source), self.count
        if count < known or (known and self.source[known - 1] != self.tokens[known - 1]):
            self.count = 0
        if count > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * count)
        self.tokens[self.count : count] = self.source[self.count :]
        self.count = count
        return self.tokens[:count]


class OutputTokens:
    """Copies of the lists that it was given, by list: each step only new tokens are read."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    def joined(self, lists: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the tokens of all lists, int32, and where each one's end, int64 [lists]."""
        if len(self._copies) > 2 * len(lists) + _OTHERS:
            self._copies.clear()
        parts = []
        for tokens in lists:
            # The copy holds its list, so that no other one gets its identity.
            copy = self._copies.get(id(tokens))
            if copy is None:
                copy = self._copies[id(tokens)] = _Copy(tokens)
            parts.append(copy.updated())
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(ends)


TokenPicks = Callable[[StepOutputs, int], list[list[int]]]
"""Returns the token of each of the first n rows of a step, [n, 1], in the scheduler's order."""

IntArray = npt.NDArray[np.int32]


def picked_by_graph(outputs: StepOutputs, count: int) -> list[list[int]]:
    """As ``TokenPicks``: the last output of the graph is the tokens, int32 [rows]."""
    picked: list[list[int]] = outputs[-1][:count, None].tolist()
    return picked


class _Call(NamedTuple):
    """A recorded call of the kernel over logits [rows, V], which writes ``tokens`` [rows, 1]."""

    recording: Recording
    tokens: IntArray


class KernelPicks:
    """Picks by the emulator's kernel; no row of the logits is copied.

    A graph has the same logits in each run, so that the kernel's call can be recorded and made
    again without torch's dispatcher, which costs a step several times what the kernel does.
    """

    def __init__(self) -> None:
        # By the identity of logits. References that end with the logits keep no released graph's
        # memory; logits are recorded when they come a second time, since some are new in each run.
        self._known: dict[int, ReferenceType[Tensor]] = {}
        self._calls: dict[int, _Call] = {}
        # Only calls of native kernels can be recorded.
        self._records = native_library() is not None

    def __call__(self, outputs: StepOutputs, count: int) -> list[list[int]]:
        logits, tokens = outputs.outputs[0], None
        key = id(logits)
        call = self._calls.get(key)
        if call is not None:
            call.recording.replay(0, 1)
            tokens = call.tokens
        elif key in self._known:
            recording = start_recording()
            try:
                tokens = torch.ops.rbln_emulator.greedy(logits).numpy()
            finally:
                recording.end()
            self._calls[key] = _Call(recording, tokens)
        else:
            if self._records:
                self._known[key] = ref(logits, lambda _: self._forget(key))
            tokens = torch.ops.rbln_emulator.greedy(logits).numpy()
        if len(tokens) != count:
            tokens = tokens[:count]
        if outputs.arrange is not None:
            tokens = outputs.arrange(tokens)
        picked: list[list[int]] = tokens.tolist()
        return picked

    def _forget(self, key: int) -> None:
        del self._known[key]
        self._calls.pop(key, None)


# (hidden rows [n, H] of a request) -> logits [n, V] in the model's dtype.
LogitsOf = Callable[[Tensor, CachedRequestState], Tensor]


class PromptLogprobs:
    """Collects ``prompt_logprobs`` of requests that have the parameter."""

    def __init__(self, sampler: Sampler, logits_of: LogitsOf, vocab_size: int) -> None:
        self._sampler = sampler
        self._get_logits = logits_of
        self._vocab_size = vocab_size

    def collect(
        self, request: CachedRequestState, hidden: Tensor | None, num_tokens: int
    ) -> LogprobsTensors | None:
        """Score a chunk of ``num_tokens`` tokens; return the prompt's table after the last chunk.

        ``hidden`` [>= num_tokens, H], or None for a step of one token, which has nothing to score:
        each row predicts the next prompt token, and the last row predicts a generated one.
        """
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None or request.prompt_token_ids is None:
            return None
        wanted = params.prompt_logprobs
        num_logprobs = self._vocab_size if wanted == -1 else wanted
        prompt = request.prompt_token_ids
        start = request.num_computed_tokens
        # A preempted request recomputes a prompt whose table was already returned.
        if start >= len(prompt) or request.output_token_ids:
            return None
        table = request.in_progress_prompt_logprobs_cpu
        if table is None:
            table = LogprobsTensors.empty_cpu(len(prompt) - 1, num_logprobs + 1)
            request.in_progress_prompt_logprobs_cpu = table
        count = min(num_tokens, len(prompt) - 1 - start)
        if count > 0 and hidden is not None:
            targets = torch.tensor(prompt[start + 1 : start + 1 + count])
            scores = self._get_logits(hidden[:count], request).to(torch.float32)
            if "logits" not in self._sampler.logprobs_mode:
                scores = self._sampler.compute_logprobs(scores)
            gathered = self._sampler.gather_logprobs(scores, num_logprobs, targets)
            rows = slice(start, start + count)
            table.logprob_token_ids[rows] = gathered.logprob_token_ids
            table.logprobs[rows] = gathered.logprobs
            table.selected_token_ranks[rows] = gathered.selected_token_ranks
        if start + num_tokens < len(prompt):
            return None
        request.in_progress_prompt_logprobs_cpu = None
        return table


class GrammarMask:
    """Masks the rows of requests with a grammar, ``rbln_grammar_mask_seconds{part="apply"}``."""

    def __init__(self, board: MetricsBoard) -> None:
        self._seconds = board.histogram("rbln_grammar_mask_seconds", part="apply")

    def apply(
        self, scheduled: SchedulerOutput, grammar: GrammarOutput, batch: InputBatch, logits: Tensor
    ) -> Tensor:
        """Return ``logits`` ([num_reqs, V], changed), -inf where a grammar forbids the token."""
        started = time.perf_counter()
        bits = grammar.grammar_bitmask
        # Masks may be padded to whole words, or logits to a multiple of a tile.
        width = min(bits.shape[1] * 32, logits.shape[1])
        # A table has eight words for each byte of the mask; the rest are operations on whole
        # vectors. A loop over single elements, as in PyTorch's ``masked_fill_``, takes several
        # times as long.
        kept, lowest = _tables(logits.dtype)
        words = logits.view(torch.int32 if logits.itemsize == 4 else torch.int16).numpy()
        for row, masked in _rows(scheduled, grammar, batch):
            if (bits[row] == -1).all():
                continue
            keep = kept.take(bits[row].view(np.uint8), axis=0).reshape(-1)[:width]
            words[masked, :width] &= keep
            np.invert(keep, out=keep)
            keep &= lowest
            words[masked, :width] |= keep
        self._seconds.observe(time.perf_counter() - started)
        return logits


@cache
def _tables(dtype: torch.dtype) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the words of each byte, [256, 8] of -1 for set bits and 0, and -inf as a word."""
    lowest = torch.tensor(-torch.inf, dtype=dtype)
    word = torch.int32 if lowest.itemsize == 4 else torch.int16
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (-torch.from_numpy(bits).to(word)).numpy(), lowest.view(word).numpy()


def _rows(
    scheduled: SchedulerOutput, grammar: GrammarOutput, batch: InputBatch
) -> Iterator[tuple[int, int]]:
    """Yield the rows of the masks, each with its row of the logits.

    Both have a row for each draft of a request behind its first one.
    """
    drafts = scheduled.scheduled_spec_decode_tokens
    row_of = batch.req_id_to_index
    starts = list(range(len(row_of)))
    if drafts:
        lengths = [1 + len(drafts.get(name, ())) for name in batch.req_ids]
        starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    first = 0
    for name in grammar.structured_output_request_ids:
        count = 1 + len(drafts.get(name, ()))
        batch_row = row_of.get(name)
        if batch_row is not None:
            start = starts[batch_row]
            yield from zip(range(first, first + count), range(start, start + count), strict=True)
        first += count
