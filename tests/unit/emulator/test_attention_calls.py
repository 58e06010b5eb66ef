"""Attention op calls of a model's layers, in both namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers.attention_ops import AttentionOptions, EmulatedAttention

LENGTH, KV_HEADS, GROUP, HEAD_SIZE, BLOCK = 6, 2, 2, 32, 16
START = torch.tensor([[0]], dtype=torch.int32)
END = torch.tensor([[LENGTH]], dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    kind: str
    """The method that is called."""
    form: dict[str, bool]
    op: str
    documented: list[str]
    """The op's arguments, by the names that the layers use."""
    before_sinks: list[str | None]
    """What stands between those and the sinks."""


ONE_BLOCK = ["q", "k", "v", "kv_cache", "seq_idx", "scale", "block_tables", "scale"]
FLASH = ["q", "k", "v", "kv_cache", "scale", "seq_idx", "block_tables", "scale"]
WINDOW = [*"q k v kv_cache cache_seq_len cache_offset scale block_tables scale".split()]
CASES = [
    Case(kind, {"is_prefill": phase == "prefill", **form}, f"{op}_naive_{phase}", names, [])
    for kind, form, op, names in (
        ("causal", {"one_block": True}, "causal_attention", ONE_BLOCK),
        ("causal", {"one_block": False}, "flash_causal_attention", FLASH),
        ("shifted_window", {}, "sliding_window_attention", WINDOW),
    )
    for phase in ("prefill", "decode")
]
CASES[-1].before_sinks.append(None)  # for the decode mask
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)


def tensors(case: Case) -> dict[str, Tensor]:
    q, k, v = (torch.randn(1, KV_HEADS, n, LENGTH, HEAD_SIZE) for n in (GROUP, 1, 1))
    made = {
        "q": q,
        "k": k,
        "v": v,
        "scale": torch.tensor(0.2),
        "seq_idx": START,
        "cache_seq_len": START,
        "cache_offset": END,
        "kv_cache": torch.zeros(3, 2, KV_HEADS, 1, BLOCK, HEAD_SIZE),
        "block_tables": torch.tensor([2], dtype=torch.int32),
    }
    return {name: made[name] for name in case.documented}


def call(
    case: Case, arguments: Mapping[str, object], *, custom: bool = False, **options: object
) -> Tensor:
    """The op's result; ``options`` are those of a layer."""
    attention = EmulatedAttention(
        AttentionOptions(**options),  # type: ignore[arg-type]
        use_custom_kernel=custom,
    )
    method = getattr(attention, case.kind)
    result: Tensor = method(**arguments, **case.form)
    return result


def traced(case: Case, *, custom: bool = False, sinks: bool = False, **more: object) -> fx.Node:
    """The call that a compiler sees; tensors carry the names of the layer's arguments."""
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    names = [*dict.fromkeys(case.documented), *(["sinks"] if sinks else [])]
    proxies = {name: tracer.create_proxy("placeholder", name, (), {}) for name in names}
    result: object = call(
        case,
        {name: proxies[name] for name in case.documented},
        custom=custom,
        sinks=proxies.get("sinks"),
        **more,
    )
    assert isinstance(result, fx.Proxy)
    return result.node


def names_of(node: fx.Node) -> list[str | None]:
    return [None if a is None else str(a) for a in node.args]


@every_case
@pytest.mark.parametrize("custom", [False, True])
def test_a_call_without_options_is_the_documented_one(case: Case, custom: bool) -> None:
    node = traced(case, custom=custom)
    assert (
        str(node.target)
        == f"{'rbln_emulated_kernels' if custom else 'rbln_emulated_ops'}.{case.op}"
    )
    assert names_of(node) == case.documented
    assert not node.kwargs


@every_case
def test_sinks_go_by_position_and_caps_by_name(case: Case) -> None:
    node = traced(case, sinks=True, soft_cap=0.5)
    assert names_of(node) == [*case.documented, *case.before_sinks, "sinks"]
    assert node.kwargs == {"logits_soft_cap": 0.5}
    assert names_of(traced(case, soft_cap=0.5)) == case.documented


@every_case
def test_options_reach_the_kernels(case: Case) -> None:
    arguments, sinks = tensors(case), torch.randn(KV_HEADS * GROUP)
    plain, sunk, capped, both = (
        call(case, arguments, **more)
        for more in ({}, {"sinks": sinks}, {"soft_cap": 0.5}, {"sinks": sinks, "soft_cap": 0.5})
    )
    for one, other in ((plain, sunk), (plain, capped), (sunk, both), (capped, both)):
        assert not torch.allclose(one, other)


@every_case
def test_the_custom_kernels_keep_keys_and_values_outermost(case: Case) -> None:
    arguments = tensors(case)
    plain = call(case, arguments)
    swapped = {**arguments, "kv_cache": torch.zeros(2, 3, KV_HEADS, 1, BLOCK, HEAD_SIZE)}
    custom = call(case, swapped, custom=True)
    assert torch.equal(custom, plain)
    assert torch.equal(swapped["kv_cache"].transpose(0, 1), arguments["kv_cache"])
    assert arguments["kv_cache"][2].any()


@every_case
def test_the_custom_kernels_refuse_what_they_lack(case: Case) -> None:
    with pytest.raises(UnsupportedModelError, match="take no sinks"):
        traced(case, custom=True, sinks=True)
    with pytest.raises(UnsupportedModelError, match="take no logits_soft_cap"):
        traced(case, custom=True, soft_cap=30.0)
