"""Tokens of sampled requests, drawn on the device: only they are copied to the host.

vllm-rbln 0.12 divides by the temperature in the logits' dtype, takes the softmax and calls the
SDK's op, in graphs of their own. It has graphs with and without ``k`` and ``p``; here one for each
number of rows takes both, because every start compiles them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from packaging.version import Version
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata

from rbln_backend.core import GraphSpec, Phase, StepOutputs
from rbln_backend.devices.port import CompiledGraph
from rbln_backend.devices.rebel.compiler import RebelGraph
from rbln_backend.graphs.operators import check_ops
from rbln_backend.worker.graph_factory import GraphFactory, GraphListener, GraphRequest

_LOGITS = "logits"
_NAMES = (_LOGITS, "temperature", "top_k", "top_p")
_SAMPLED = (Phase.PREFILL, Phase.DECODE)


def sampler_specs(specs: Sequence[GraphSpec]) -> list[GraphSpec]:
    """Return the graphs that draw the tokens of ``specs``, smallest first."""
    rows = {spec.requests for spec in specs if spec.phase in _SAMPLED}
    return [GraphSpec.of(Phase.SAMPLE, count) for count in sorted(rows)]


class _LoadedGraph(NamedTuple):
    graph: RebelGraph
    inputs: Mapping[str, Tensor]
    """The buffers in host memory: temperature and top_p float32, top_k int32, each [rows]."""


class DeviceSampler:
    """Draws with the SDK's ``top_k_top_p``, which takes the seed of the engine, not of a request.

    Greedy requests are drawn from their likeliest token alone. A request without ``top_p`` has 1.0,
    as vLLM samples it, and 0.995 with SDK 0.12.0: vllm-rbln 0.12.0 never gives the op more, until
    it is mended, and a release for 0.12.1 does.
    """

    def __init__(self, sdk_version: str) -> None:
        """`sdk_version` is the installed SDK's.

        Raises ``UnsupportedModelError`` where the installed SDK lacks the op.
        """
        check_ops("top_k_top_p")
        self._largest_top_p = 1.0 if Version(sdk_version) > Version("0.12.0") else 0.995
        self._loaded: dict[int, _LoadedGraph] = {}

    def compile(
        self, graphs: Sequence[CompiledGraph], factory: GraphFactory, listener: GraphListener
    ) -> None:
        """Compile a graph for the logits of each of the model's ``graphs``, and run it once."""
        for graph in graphs:
            (spec,) = sampler_specs([graph.spec]) or (None,)
            if spec is None or spec.bucket in self._loaded:
                continue
            listener.graph_started(spec)
            started = time.perf_counter()
            self._loaded[spec.bucket] = _load(spec, graph, factory, self._largest_top_p)
            listener.graph_done(spec, "compiled", time.perf_counter() - started)

    def takes(self, metadata: SamplingMetadata) -> bool:
        """Return True if no request has a seed, or a filter that the op does not have.

        Called for steps that change or report no logits.
        """
        return not metadata.generators and all(
            isinstance(processor, MinPLogitsProcessor) and not processor.min_p_count
            for processor in metadata.logitsprocs.argmax_invariant
        )

    def draw(self, outputs: StepOutputs, count: int, metadata: SamplingMetadata) -> list[list[int]]:
        """Return the tokens of the first ``count`` rows of a step, [count, 1]."""
        logits = outputs.outputs[0]
        rows, vocab_size = logits.shape
        graph, inputs = self._loaded[rows]
        row_of_request = outputs.arranged(torch.arange(rows))[:count]
        _fill(inputs, row_of_request, metadata, vocab_size)
        inputs["top_p"].clamp_(max=self._largest_top_p)
        (tokens,) = graph.run_over(_LOGITS, logits)
        drawn: list[list[int]] = outputs.arranged(tokens.cpu())[:count, None].tolist()
        return drawn


def _load(
    spec: GraphSpec, graph: CompiledGraph, factory: GraphFactory, top_p: float
) -> _LoadedGraph:
    """Return the graph ``spec`` over logits like those of ``graph``, run once with ``top_p``."""
    inputs = {
        "temperature": torch.ones(spec.bucket),
        "top_k": torch.ones(spec.bucket, dtype=torch.int32),
        "top_p": torch.full((spec.bucket,), top_p),
    }
    logits = graph.run()[0]
    buffers = {_LOGITS: torch.zeros(logits.shape, dtype=logits.dtype), **inputs}
    sampling_graph = factory.build_other(GraphRequest(spec, buffers, None), _draw, _NAMES)
    sampling_graph.run()
    return _LoadedGraph(cast("RebelGraph", sampling_graph), inputs)


def _fill(
    inputs: Mapping[str, Tensor], rows: Tensor, metadata: SamplingMetadata, vocab_size: int
) -> None:
    """Fill the rows at ``rows`` [n] with the parameters of each request."""
    temperature, top_k, top_p = metadata.temperature, metadata.top_k, metadata.top_p
    # None where all requests are greedy, whose tokens are picked.
    assert temperature is not None
    is_greedy = temperature.eq(0)
    inputs["temperature"][rows] = temperature.masked_fill(is_greedy, 1.0)
    every = torch.full_like(rows, vocab_size, dtype=torch.int32) if top_k is None else top_k
    inputs["top_k"][rows] = every.masked_fill(is_greedy, 1)
    inputs["top_p"][rows] = torch.ones(len(rows)) if top_p is None else top_p


def _draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor]:
    """[rows, V], then [rows] each -> tokens int32 [rows]."""
    scaled = logits / temperature.to(logits.dtype).unsqueeze(1)
    probs = torch.nn.functional.softmax(scaled, dim=-1)
    return (torch.ops.rbln.top_k_top_p(probs, top_k, top_p),)
