"""Which prompts share a prefill step, and which wait for what another one computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from rbln_backend.buckets import BucketTable, ChunkPlan
from rbln_backend.scheduler.prompts import StepBounds, prompts_together

UNIT = 4
HASH = get_hash_fn_by_name("sha256")
PLAN = ChunkPlan(BucketTable((16, 32, 64, 128)), 16, prompts=4)


@dataclass
class Cache:
    """What is asked of a KV cache manager; ``hits`` by request."""

    hits: dict[str, int]
    block_pool: Any = field(default_factory=lambda: SimpleNamespace(hash_block_size=UNIT))

    def peek_hit(self, request: Request) -> int:
        return self.hits.get(request.request_id, 0)


def request(name: str, tokens: list[int], adapter: int = 0) -> Request:
    init_none_hash(HASH)
    lora = LoRARequest(str(adapter), adapter, "folder") if adapter else None
    hasher = get_request_block_hasher(UNIT, HASH)
    params = SamplingParams(max_tokens=2)
    return Request(name, tokens, params, None, lora_request=lora, block_hasher=hasher)


def prompt(length: int, first: int) -> list[int]:
    return list(range(first, first + length))


def together(
    *waiting: Request,
    prefilling: tuple[Request, ...] = (),
    room: int = 9,
    tokens: int = 128,
    prompt_tokens: int = 128,
    **hits: int,
) -> dict[str, int]:
    cache: Any = Cache(hits)
    bounds = StepBounds(room, tokens, prompt_tokens)
    return prompts_together(PLAN, prefilling, waiting, bounds, cache)


def test_prompts_that_fit_go_together_in_their_order() -> None:
    short = [request(name, prompt(16, 100 * n)) for n, name in enumerate("abcdef")]
    assert together(*short) == dict.fromkeys("abcd", 16)
    assert together(*short, room=2) == {"a": 16, "b": 16}
    assert together(short[0]) == {}
    # A long one in front is not passed by.
    assert together(request("long", prompt(200, 900)), *short) == {}
    assert together(*short[:2], request("long", prompt(200, 900)), *short[2:]) == {"a": 16, "b": 16}


def test_the_rest_of_a_prompt_is_joined_by_others() -> None:
    long, short = request("long", prompt(300, 900)), request("a", prompt(20, 0))
    long.num_computed_tokens = 290
    assert together(short, prefilling=(long,)) == {"long": 10, "a": 20}
    long.num_computed_tokens = 100
    assert together(short, prefilling=(long,)) == {}


def test_what_the_cache_has_is_not_counted() -> None:
    waiting = [request(name, prompt(100, 100 * n)) for n, name in enumerate("ab")]
    assert together(*waiting) == {}
    assert together(*waiting, a=80, b=92) == {"a": 20, "b": 8}


@pytest.mark.parametrize(("hit", "joins"), [(0, False), (8, True)])
def test_a_prompt_waits_for_the_prefix_that_another_one_computes(hit: int, joins: bool) -> None:
    stem = prompt(8, 500)
    waiting = [request(name, stem + prompt(12, 100 * n)) for n, name in enumerate("ab")]
    expected = dict.fromkeys("ab", 20 - hit) if joins else {}
    assert together(*waiting, a=hit, b=hit) == expected
    # Less than a unit in common is nothing to hit.
    alike = [request(name, [7, 7, 7, n, *prompt(16, 100 * n)]) for n, name in enumerate("ab")]
    assert together(*alike) == {"a": 20, "b": 20}


def test_the_prompts_of_a_step_have_one_adapter() -> None:
    waiting = [request(str(n), prompt(20, 100 * n), adapter) for n, adapter in enumerate((1, 1, 2))]
    assert together(*waiting) == {"0": 20, "1": 20}
    assert together(*waiting[1:]) == {}


def test_no_prompt_that_a_step_would_cut_is_among_them() -> None:
    short, long = request("short", prompt(16, 0)), request("long", prompt(100, 200))
    long.num_computed_tokens = 60
    assert together(short, prefilling=(long,)) == {"long": 40, "short": 16}
    assert together(short, prefilling=(long,), prompt_tokens=40) == {"long": 40, "short": 16}
    assert together(short, prefilling=(long,), prompt_tokens=39) == {}
    waiting = request("waiting", prompt(40, 400))
    assert together(short, waiting) == {"short": 16, "waiting": 40}
    assert together(short, waiting, prompt_tokens=39) == {}


def test_all_of_them_are_within_the_budget_of_a_step() -> None:
    some = [request(name, prompt(16, 100 * n)) for n, name in enumerate("abcd")]
    assert together(*some, tokens=64) == dict.fromkeys("abcd", 16)
    assert together(*some, tokens=63) == dict.fromkeys("abc", 16)
    assert together(*some, tokens=31) == {}
