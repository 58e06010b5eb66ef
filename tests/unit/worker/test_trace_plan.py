"""Which graphs are traced, and which follow from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from rbln_backend.compiler.programs.program import Program
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.errors import CorruptArtifactError
from rbln_backend.worker.graphs.trace_plan import TracePlan

Trace = Callable[[GraphSpec], Program]

DECODE = [GraphSpec.of(Phase.DECODE, size) for size in (1, 2, 4, 8, 16, 32, 64)]
PREFILL = [GraphSpec.of(Phase.PREFILL, 16 << n, prompts=min(1 << n, 8)) for n in range(5)]
HEAD = GraphSpec.of(Phase.LOGITS, 32)


def trace(spec: GraphSpec, method: str = "view") -> Program:
    """Return ``input.view(tokens, prompts)``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_method(method, (x, spec.bucket, spec.prompts)),))
    return Program(graph, ("input:x",))


def accept(spec: GraphSpec, program: Program) -> None:
    assert program.to_bytes() == trace(spec).to_bytes()


def traced(plan: TracePlan, trace_one: Trace = trace) -> tuple[list[str], list[str]]:
    """Return the graphs that ``plan`` wanted, in order, and those that it derived."""
    wanted, derived = [], []
    while plan.wanted:
        spec = plan.wanted[0]
        wanted.append(str(spec))
        derived += [str(found) for found, _ in plan.add(spec, trace_one(spec))]
    return wanted, derived


def test_the_ends_of_each_phase_are_traced() -> None:
    """A size of 1, of requests or prompts, is always traced."""
    wanted, derived = traced(TracePlan([*PREFILL, *DECODE, HEAD], accept))
    assert sorted(wanted) == [
        *("decode-1", "decode-2", "decode-64", "logits-32"),
        *("prefill-16", "prefill-256", "prefill-32"),
    ]
    assert sorted(derived) == [
        *("decode-16", "decode-32", "decode-4", "decode-8", "prefill-128", "prefill-64"),
    ]


def test_without_a_check_every_graph_is_traced() -> None:
    wanted, derived = traced(TracePlan([*PREFILL, *DECODE], None))
    assert wanted == [str(spec) for spec in (*PREFILL, *DECODE)]
    assert derived == []


def test_middles_are_traced_where_the_ends_differ() -> None:
    """Batches of more than 16 take another way through the model."""

    def two_ways(spec: GraphSpec) -> Program:
        return trace(spec, "view" if spec.bucket <= 16 else "reshape")

    wanted, derived = traced(TracePlan(DECODE, lambda *_: None), two_ways)
    assert wanted == ["decode-1", "decode-2", "decode-64", "decode-16", "decode-32"]
    assert derived == ["decode-4", "decode-8"]


def test_derived_programs_that_the_device_refuses_are_traced() -> None:
    def refuse(spec: GraphSpec, _: Program) -> None:
        if spec.bucket < 32:
            raise CorruptArtifactError("it does not fit its tensors")

    wanted, derived = traced(TracePlan(DECODE, refuse))
    assert set(wanted) == {f"decode-{size}" for size in (1, 2, 4, 8, 16, 64)}
    assert derived == ["decode-32"]


@pytest.mark.parametrize("spec", [HEAD, DECODE[3]])
def test_a_single_missing_graph_is_traced(spec: GraphSpec) -> None:
    assert traced(TracePlan([spec], accept)) == ([str(spec)], [])
