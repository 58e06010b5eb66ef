"""Routing in plain operators, against the words of the models' papers, row by row."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.graphs.call_list import CallList
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable
from rbln_backend.layers.moe import choose_path
from rbln_backend.layers.routing import Routing, local_ids, weights_by_expert

LOGITS = torch.randn(20, 8, generator=torch.Generator().manual_seed(3))
X = torch.zeros(20, 4)
BIAS = torch.tensor([0.3, -0.2, 0.0, 0.4, -0.5, 0.1, 0.2, -0.3])


def scores_of(row: Tensor, scoring: str) -> list[float]:
    values = [float(value) for value in row]
    if scoring == "softmax":
        total = sum(map(math.exp, values))
        return [math.exp(value) / total for value in values]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in values]
    return [math.sqrt(math.log1p(math.exp(value))) for value in values]


def expected(row: Tensor, routing: Routing) -> dict[int, float]:
    """Which experts of one row count how much."""
    scores = scores_of(row, routing.scoring)
    bias = [0.0] * len(scores) if routing.bias is None else routing.bias.tolist()
    biased = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // routing.groups
    speakers = 1 if routing.bias is None else 2
    groups = [sorted(biased[g * size : (g + 1) * size])[-speakers:] for g in range(routing.groups)]
    best_groups = sorted(range(routing.groups), key=lambda g: -sum(groups[g]))
    is_open = set(best_groups[: routing.top_groups])
    order = sorted(range(len(scores)), key=lambda e: -biased[e])
    chosen = [e for e in order if e // size in is_open][: routing.top_k]
    total = sum(scores[e] for e in chosen) if routing.renormalize else 1.0
    return {e: scores[e] / total * routing.scale for e in chosen}


ROUTINGS: list[dict[str, Any]] = [
    {},
    {"scoring": "sigmoid"},
    {"scoring": "sqrtsoftplus", "scale": 2.5},
    {"scoring": "sigmoid", "bias": BIAS, "scale": 1.5},
    {"scoring": "softmax", "bias": BIAS},
    {"groups": 4, "top_groups": 2},
    {"scoring": "sigmoid", "groups": 4, "top_groups": 2},
    {"scoring": "sigmoid", "bias": BIAS, "groups": 2, "top_groups": 1},
]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("options", ROUTINGS)
def test_experts_and_their_weights(options: dict[str, Any], renormalize: bool) -> None:
    routing = Routing(top_k=3, renormalize=renormalize, **options)
    weights, ids = routing.choose(X, LOGITS)
    assert weights.dtype == torch.float32
    for row, (logits, found, numbers) in enumerate(zip(LOGITS, weights, ids, strict=True)):
        wanted = expected(logits, routing)
        assert set(numbers.tolist()) == set(wanted), row
        for number, weight in zip(numbers.tolist(), found.tolist(), strict=True):
            assert weight == pytest.approx(wanted[number], rel=1e-5)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("options", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_all_experts(
    options: dict[str, Any], renormalize: bool, dtype: torch.dtype
) -> None:
    """By expert, then by row; zeros for experts that are not chosen, and in padding."""
    routing = Routing(top_k=3, renormalize=renormalize, **options)
    logits, mask = LOGITS.to(dtype), torch.ones(20, 1)
    mask[17:] = 0.0
    x, by_expert = routing.spread(X, logits, mask)
    assert x is X
    # A bias is float32, as checkpoints have it.
    assert by_expert.dtype == (torch.float32 if routing.bias is not None else dtype)
    assert not by_expert[:, 17:].any()
    step = 16 * torch.finfo(dtype).eps
    for row, column in enumerate(by_expert.T[:17]):
        wanted = expected(logits[row].float(), routing)
        found = {e: float(column[e]) * routing.scale for e in column.nonzero().flatten().tolist()}
        assert found == pytest.approx(wanted, rel=step), row


def test_the_chain_that_a_compiler_makes_one_op_of() -> None:
    """Of vllm-rbln 0.12, in its order, also after a round trip through the store."""
    routing, mask = Routing(top_k=2), torch.ones(20, 1)
    steps = {"logits": LOGITS, "mask": mask}
    table = TensorTable(lambda weight: weight)
    captured = capture(
        lambda logits, mask: routing.spread(X, logits, mask)[1:], (LOGITS, mask), table, steps
    )
    program = Program.from_bytes(captured.to_bytes())
    calls = [node for node in program.graph.nodes if node.op.startswith("call")]
    names = [str(getattr(node.target, "__name__", node.target)) for node in calls]
    assert [name for name in names if name != "getitem"] == [
        *"transpose topk softmax zeros_like scatter_ transpose mul".split()
    ]
    (found,) = CallList(program.graph)(LOGITS, mask)
    assert torch.equal(found, routing.spread(X, LOGITS, mask)[1])


def test_weights_of_all_experts_on_inputs_and_by_a_function() -> None:
    x = torch.randn(20, 4)
    routing = Routing(top_k=1, scoring="sigmoid", renormalize=False, on_input=True)
    given, by_expert = routing.spread(x, LOGITS, None)
    assert torch.equal(given, x * LOGITS.max(dim=1, keepdim=True)[0].sigmoid())
    assert torch.equal(by_expert, functional.one_hot(LOGITS.argmax(dim=1), 8).T.float())

    def last_expert(**_: Any) -> tuple[Tensor, Tensor]:
        return torch.full((20, 1), 0.5), torch.full((20, 1), 7, dtype=torch.int32)

    _, by_expert = Routing(top_k=1, function=last_expert).spread(x, LOGITS, None)
    assert torch.equal(by_expert, torch.tensor([0.0] * 7 + [0.5])[:, None].expand(8, 20))


def test_a_model_may_bring_its_own_function() -> None:
    def first_experts(**given: Any) -> tuple[Tensor, Tensor]:
        assert set(given) == {"hidden_states", "gating_output", "topk", "renormalize"}
        ids = torch.arange(given["topk"]).expand(given["gating_output"].shape[0], -1)
        return torch.full(ids.shape, 0.5, dtype=torch.bfloat16), ids

    weights, ids = Routing(top_k=2, function=first_experts).choose(X, LOGITS)
    assert weights.dtype == torch.float32
    assert (weights[3].tolist(), ids[3].tolist()) == ([0.5, 0.5], [0, 1])


def test_weights_on_inputs_leave_results_alone() -> None:
    x = torch.randn(20, 4)
    weights, ids = Routing(top_k=1, scoring="sigmoid", renormalize=False).choose(x, LOGITS)
    routing = Routing(top_k=1, scoring="sigmoid", renormalize=False, on_input=True)
    given, counts, chosen = routing.route(x, LOGITS)
    assert torch.equal(given, x * weights)
    assert torch.equal(counts, torch.ones(20, 1))
    assert torch.equal(chosen, ids)
    assert not Routing(top_k=1, on_input=True).is_plain


def test_the_op_knows_nothing_but_a_softmax() -> None:
    assert Routing(top_k=2).is_plain
    assert not Routing(top_k=2, scale=2.0).is_plain
    assert not Routing(top_k=2, bias=BIAS).is_plain
    assert not Routing(top_k=2, groups=2).is_plain


def test_ids_of_a_rank() -> None:
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]])
    elsewhere = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    assert local_ids(ids, None, None).tolist() == ids.tolist()
    assert local_ids(ids, elsewhere, mask).tolist() == [[-1, -1], [1, 0], [-1, -1]]
    # Weights leave other ranks' experts out.
    ids = torch.tensor([[-1, 1], [0, 1], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.4, 0.6], [0.3, 0.7], [0.5, 0.5]])
    spread = weights_by_expert(weights, ids, 2)
    assert torch.equal(spread, torch.tensor([[0.0, 0.6], [0.3, 0.7], [0.0, 0.0]]))


# -------------------------------------------------------------------------------------------- paths
@pytest.mark.parametrize(
    ("opt", "custom", "npu", "activation", "path"),
    [
        (True, True, False, "silu", "opt"),
        (True, False, False, "swigluoai", "opt"),
        (False, True, False, "silu", "custom"),
        (False, False, False, "silu", "native"),
        (True, True, True, "silu", "glu"),
        (False, True, True, "silu", "glu"),
        (False, False, True, "silu", "native"),
        (True, True, True, "swigluoai", "native"),
    ],
)
def test_order(*, opt: bool, custom: bool, npu: bool, activation: str, path: str) -> None:
    choice = choose_path(use_opt=opt, use_custom=custom, has_fused_op=npu, activation=activation)
    assert choice.path == path
    assert choice.reason
