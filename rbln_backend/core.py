"""The types of one engine step, from the scheduler's output to the outputs of a graph.

1. The scheduler (`scheduler/scheduler.py`) picks one prefill chunk or one decode batch.
2. `worker/batch.py` applies its output to the state of each request (vLLM's
   `CachedRequestState`: tokens, blocks, sampling parameters) and to one of two persistent batches
   (vLLM's `InputBatch`: a row for each request). The requests of the step are a `StepBatch`.
3. `worker/ranks.py` turns it into one `StepRound`, or into several where data-parallel
   ranks share the experts of a model.
4. `worker/graph_set.py` selects the smallest compiled graph that holds the round. A
   `GraphSpec` names it: a `Phase` and a static shape.
5. `worker/runner.py` fills the buffers of that graph in place (`worker/inputs.py`), runs
   it and returns a `StepResult`.
6. `worker/runner.py` samples a token for each request from the logits and appends it to the
   request's state. Rows of padding are never sampled.

Copies of KV that belong to a step, decided by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rbln_backend.buckets import get_padded_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class Phase(Enum):
    """Kind of step that a graph computes."""

    PREFILL = "prefill"
    """A chunk of prompt tokens, of one request or one after the other of several: ``[1, bucket]``
    in, ``[prompts, vocab]`` out."""
    DECODE = "decode"
    """One token of each of ``bucket`` requests: ``[bucket, 1]`` in, ``[bucket, vocab]`` out."""
    VERIFY = "verify"
    """As DECODE, with drafts: ``[bucket, length]`` in, ``[bucket * length, vocab]`` out."""
    LOGITS = "logits"
    """The LM head alone over ``bucket`` hidden rows, for prompt logprobs."""
    POOLING = "pooling"
    """As PREFILL, of a pooling model: ``[1, bucket]`` in, ``[bucket, hidden]`` out."""
    DRAFT = "draft"
    """A draft model: Medusa's heads over ``bucket`` hidden rows, to drafts ``[bucket, drafts]``; or
    a layer over ``[bucket, length]`` tokens and their hidden states, to one draft each; or a model
    over the tokens alone."""
    DRAFT_PREFILL = "draft_prefill"
    """A draft layer or model over a chunk of prompt tokens, as PREFILL."""
    ADAPTERS = "adapters"
    """The product of ``bucket`` rows with the adapter slots of one layer, for the test of an NPU's
    slots at start."""
    SAMPLE = "sample"
    """The draw of a token from each of ``bucket`` rows of logits, on the device."""

    @property
    def takes_chunk(self) -> bool:
        """True if a run is a chunk of prompt tokens."""
        return self in (Phase.PREFILL, Phase.POOLING, Phase.DRAFT_PREFILL)


@dataclass(frozen=True, order=True)
class GraphSpec:
    """One static shape of one phase; ``bucket`` counts tokens of a chunk, requests or rows."""

    phase_name: str
    bucket: int
    length: int = 1
    """Tokens of each request, in VERIFY."""
    prompts: int = 1
    """Requests whose tokens a chunk can hold, in PREFILL."""

    @classmethod
    def of(cls, phase: Phase, bucket: int, length: int = 1, prompts: int = 1) -> GraphSpec:
        return cls(phase.value, bucket, length, prompts)

    @property
    def phase(self) -> Phase:
        return Phase(self.phase_name)

    @property
    def batch_size(self) -> int:
        """The batch axis B of the input ids [B, L]."""
        return 1 if self.phase.takes_chunk else self.bucket

    @property
    def query_len(self) -> int:
        """The other axis L: tokens of a chunk, or of each request."""
        return self.bucket if self.phase.takes_chunk else self.length

    @property
    def requests(self) -> int:
        """Most requests of a run."""
        return self.prompts if self.phase.takes_chunk else self.bucket

    @property
    def size(self) -> str:
        """The shape as text: ``8``, or ``8x4`` for 4 tokens of each of 8 requests."""
        return str(self.bucket) if self.length == 1 else f"{self.bucket}x{self.length}"

    def __str__(self) -> str:
        return f"{self.phase_name}-{self.size}"


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, in the order of the rows of ``input_batch``."""

    phase: Phase
    input_batch: InputBatch
    num_reqs: int
    """Requests with a row in ``input_batch``."""
    num_tokens: int
    """Tokens of the step: of a chunk in prefill, one for each of ``num_rows`` and the drafts in
    decode."""
    samples: bool
    """False for a chunk that ends no prompt: no token is sampled."""
    drafts: Sequence[Sequence[int]] = ()
    """The drafts of each request in VERIFY, else empty."""
    counts: Sequence[int] = ()
    """The tokens of each request in prefill, else empty."""
    unfinished: Sequence[int] = ()
    """Rows of a prefill chunk whose prompts continue after it: nothing is sampled for them."""
    decode_prefill: Sequence[CachedRequestState] = ()
    """Requests that prefill one prompt token in a decode step, in rows behind ``input_batch``:
    nothing is sampled for them."""

    @cached_property
    def num_rows(self) -> int:
        return self.num_reqs + len(self.decode_prefill)

    @property
    def length(self) -> int:
        """Tokens of the request with the most drafts, its latest token included."""
        return 1 + max(map(len, self.drafts), default=0)

    @property
    def size(self) -> int:
        """The size that the bucket must hold: tokens in prefill, requests in decode."""
        takes_chunk = self.phase.takes_chunk
        return get_padded_size(self.num_tokens, self.num_reqs) if takes_chunk else self.num_rows

    @property
    def useful(self) -> UsefulRows | None:
        """The rows of a graph that the step needs; None: all."""
        if self.phase is Phase.PREFILL:
            return UsefulRows(self.num_tokens, self.num_reqs if self.samples else 0)
        return None


class UsefulRows(NamedTuple):
    """The first rows of a graph, which are not padding and whose results are read."""

    rows: int
    """Tokens of a chunk, or requests of a decode step."""
    ends: int = 1
    """Prompts of a chunk whose logits are read."""
    reads_hidden: bool = True
    """False where hidden states [L, H] of a chunk are not read; with no ``ends`` the chunk writes
    KV caches alone."""


class StepRound(NamedTuple):
    """One graph of a step; data-parallel ranks that share experts run their rounds together."""

    phase: Phase
    size: int
    """As ``StepBatch.size``, of the rank with the largest batch."""
    counts: tuple[int, ...]
    """Tokens of a chunk or rows, by rank; 0 for ranks that run padding alone."""


class StepOutputs:
    """The outputs of a graph, each copied from the device when it is read.

    The next run of the graph may overwrite them.
    """

    def __init__(
        self, outputs: Sequence[Tensor], arrange: Callable[[Any], Any] | None = None
    ) -> None:
        """``outputs``: as the graph has them.

        ``arrange`` brings one [rows, ...] in host memory into the scheduler's order; None: it is.
        """
        self.outputs, self.arrange = outputs, arrange

    def __getitem__(self, number: int) -> Tensor:
        output: Tensor = self.arranged(self.outputs[number].cpu())
        return output

    def arranged(self, values: Any) -> Any:
        """Return ``values`` [rows, ...], in the graph's order, in the scheduler's order."""
        return values if self.arrange is None else self.arrange(values)

    def cloned(self) -> StepOutputs:
        """Return copies, which another run does not overwrite."""
        return StepOutputs([output.clone() for output in self.outputs], self.arrange)


class StepResult(NamedTuple):
    """The outputs of a step's graph. The next run may overwrite them."""

    batch: StepBatch
    outputs: StepOutputs
    """Logits [bucket, V], or [bucket, length, V] in VERIFY; then hidden states in prefill, and in
    every step where a draft model reads them; last the tokens int32 [bucket] that a device picked.
    """


@dataclass(frozen=True)
class WindowRestore:
    """Before the step: fill a request's window block with the tokens before ``num_tokens``."""

    group: int
    block: int
    pages: tuple[int, ...]
    """Log pages in order; the last one ends at ``num_tokens``."""
    num_tokens: int


@dataclass(frozen=True)
class WindowStore:
    """After the step: copy one page of tokens, which starts at ``slot`` of a window block."""

    group: int
    block: int
    slot: int
    page: int


@dataclass
class WindowTransfers:
    """All copies of one step. Restores run before the forward pass, stores after it."""

    restores: list[WindowRestore] = field(default_factory=list)
    stores: list[WindowStore] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.restores or self.stores)


class HeadCopy(NamedTuple):
    """Before the step: copy the first tokens of a shared block into a request's own block.

    Two fields have the names of vLLM's ``KVCacheBlockCopy``, in whose place it stands.
    """

    src_block_id: int
    dst_block_id: int
    group: int
    num_tokens: int


class PagePart(NamedTuple):
    """Tokens that lie together in each layer of a KV cache group."""

    group: int
    block: int
    """A block of a paged group, a page of the log of a window group."""
    slot: int
    """The first token in it."""
    tokens: int


@dataclass(frozen=True)
class PageMove:
    """A page of tokens of some groups, between the KV cache and host memory."""

    page: Tensor
    """Bytes [page_bytes]: K and V of each layer of each part."""
    parts: Sequence[PagePart]


@dataclass
class PageMoves:
    """All pages of one step. Loads run before everything else of it, stores after it."""

    loads: list[PageMove] = field(default_factory=list)
    stores: list[PageMove] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)
