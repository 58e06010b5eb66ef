"""A row of a batch holds its request's state and nothing else, after any arrivals, ends and moves.

Every field of vLLM's batch and of its sampling metadata has a rule below. A field that a release
adds has none, and the test of the rules fails until it is classified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.worker.batch import IsolatedInputBatch

ROWS, VOCABULARY, CONTEXT = 4, 23, 24
CPU = torch.device("cpu")
THINKING = SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2])


def make_batch(*, pools: bool = False) -> IsolatedInputBatch:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processors = [
        kind(config, CPU, False)  # type: ignore[arg-type]  # of a configuration they read one number
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    ]
    return IsolatedInputBatch(
        max_num_reqs=ROWS,
        max_model_len=CONTEXT,
        max_num_batched_tokens=CONTEXT,
        device=CPU,
        vocab_size=VOCABULARY,
        block_sizes=[4, 8],
        kernel_block_sizes=[4, 8],
        max_num_blocks_per_req=[6, 3],
        num_spec_tokens=2,
        is_pooling_model=pools,
        reasoning_config=THINKING,  # type: ignore[arg-type]  # of which it reads these two
        logitsprocs=LogitsProcessors([] if pools else processors),
    )


# What a row's request is said to have by each field: (batch, row, request id) -> value.
Rule = Callable[[Any, int, str], Any]


def by_row(name: str) -> Rule:
    return lambda batch, row, _: getattr(batch, name)[row]


def in_dict_by_row(name: str) -> Rule:
    return lambda batch, row, _: getattr(batch, name).get(row)


def in_dict_by_request(name: str) -> Rule:
    return lambda batch, _, request: getattr(batch, name).get(request)


def in_set(name: str) -> Rule:
    return lambda batch, _, request: request in getattr(batch, name)


def tokens(name: str) -> Rule:
    return lambda batch, row, _: getattr(batch, name)[row, : batch._get_active_token_count(row)]


def blocks(batch: Any, row: int, _: str) -> Any:
    tables = batch.block_table.block_tables
    return [(t.num_blocks_per_row[row], t.get_numpy_array()[row]) for t in tables]


def mask(batch: Any, row: int, _: str) -> Any:
    whole = batch.allowed_token_ids_mask_cpu_tensor
    return torch.zeros(VOCABULARY, dtype=torch.bool) if whole is None else whole[row]


def lora_users(batch: Any, _: int, request: str) -> Any:
    return {number for number, users in batch.lora_id_to_request_ids.items() if request in users}


def thinking(batch: Any, row: int, _: str) -> Any:
    holder = batch.thinking_budget_state_holder
    return None if holder is None else holder._state.get(row)


def processors(batch: Any, row: int, _: str) -> Any:
    least, bias, min_p = [
        *batch.logitsprocs.non_argmax_invariant,
        *batch.logitsprocs.argmax_invariant,
    ]
    biased = [
        column[bias.logits_slice[0] == row] for column in (bias.logits_slice[1], bias.bias_tensor)
    ]
    stops = least.logits_slice[1][least.logits_slice[0] == row]
    drawn = float(min_p.min_p[row]) if min_p.min_p_count else 0.0
    held = (least.min_toks.get(row), bias.biases.get(row), float(min_p.min_p_cpu[row]))
    return (
        *held,
        drawn,
        stops.sort().values,
        dict(zip(*(c.tolist() for c in biased), strict=True)),
    )


_SETS = """greedy_reqs random_reqs top_p_reqs top_k_reqs frequency_penalties_reqs
presence_penalties_reqs repetition_penalties_reqs has_allowed_token_ids
thinking_token_budget_reqs"""
_SAMPLED = """temperature_cpu top_p_cpu top_k_cpu frequency_penalties_cpu presence_penalties_cpu
repetition_penalties_cpu num_accepted_tokens_cpu"""

ROW_RULES: Mapping[str, Rule] = {
    **{name: by_row(name) for name in ("_req_ids", "req_output_token_ids", "spec_token_ids")},
    **{name: tokens(name) for name in ("token_ids_cpu", "is_token_ids")},
    **{name: by_row(name) for name in ("num_tokens_no_spec", "num_prompt_tokens")},
    **{name: by_row(name) for name in ("num_computed_tokens_cpu", "request_lora_mapping")},
    **{name: by_row(name) for name in ("logits_processing_needs_token_ids",)},
    "replayssm_decode_base": by_row("replayssm_decode_base"),
    "req_prompt_embeds": in_dict_by_row("req_prompt_embeds"),
    "req_id_to_index": in_dict_by_request("req_id_to_index"),
    "block_table": blocks,
    "lora_id_to_request_ids": lora_users,
    "pooling_params": in_dict_by_request("pooling_params"),
    "pooling_states": in_dict_by_request("pooling_states"),
}
SAMPLING_RULES: Mapping[str, Rule] = {
    **{name: by_row(name) for name in _SAMPLED.split()},
    **{name: in_set(name) for name in _SETS.split()},
    **{name: in_dict_by_row(name) for name in ("generators", "bad_words_token_ids")},
    **{name: in_dict_by_request(name) for name in ("num_logprobs", "logprob_token_ids")},
    "allowed_token_ids_mask_cpu_tensor": mask,
    "thinking_budget_state_holder": thinking,
    "logitsprocs": processors,
}
"""Of no meaning in a model that pools."""

OTHERS = frozenset(
    """is_pooling_model max_num_reqs max_model_len max_num_batched_tokens device vocab_size
    use_replayssm logitsprocs_need_output_token_ids
    token_ids_cpu_tensor is_token_ids_tensor num_tokens_no_spec_cpu_tensor
    num_prompt_tokens_cpu_tensor num_computed_tokens_cpu_tensor replayssm_decode_base_cpu_tensor
    temperature_cpu_tensor top_p_cpu_tensor top_k_cpu_tensor frequency_penalties_cpu_tensor
    presence_penalties_cpu_tensor repetition_penalties_cpu_tensor num_accepted_tokens_cpu_tensor
    temperature top_p top_k frequency_penalties presence_penalties repetition_penalties
    allowed_token_ids_mask sampling_metadata
    lora_id_to_lora_request batch_update_builder
    prev_sampled_token_ids prev_req_id_to_index sampled_token_ids_cpu async_copy_ready_event
    """.split()
)
"""Constants, the tensors of arrays above, what ``METADATA_RULES`` reads, and state of asynchronous
steps, of which this engine has none."""


def whole(name: str) -> Rule:
    return lambda metadata, *_: getattr(metadata, name)


def row_of(name: str) -> Rule:
    def rule(metadata: Any, row: int, _: str) -> Any:
        values = getattr(metadata, name)
        return None if values is None else values[row]

    return rule


def if_penalised(name: str) -> Rule:
    return lambda metadata, row, _: None if metadata.no_penalties else getattr(metadata, name)[row]


METADATA_RULES: Mapping[str, Rule] = {
    **{name: whole(name) for name in ("all_greedy", "all_random", "max_num_logprobs")},
    "no_penalties": whole("no_penalties"),
    **{name: row_of(name) for name in ("temperature", "top_p", "top_k", "prompt_token_ids")},
    **{
        name: if_penalised(name)
        for name in ("frequency_penalties", "presence_penalties", "repetition_penalties")
    },
    "output_token_ids": lambda metadata, row, _: (metadata.output_token_ids or [None] * ROWS)[row],
    "allowed_token_ids_mask": row_of("allowed_token_ids_mask"),
    "spec_token_ids": row_of("spec_token_ids"),
    "generators": in_dict_by_row("generators"),
    "bad_words_token_ids": in_dict_by_row("bad_words_token_ids"),
    "logprob_token_ids": lambda metadata, row, _: (metadata.logprob_token_ids or {}).get(row),
    "logitsprocs": processors,
    "thinking_budget_state_holder": thinking,
}


def test_every_field_of_vllms_batch_has_a_rule() -> None:
    ruled = ROW_RULES.keys() | SAMPLING_RULES.keys() | OTHERS
    assert vars(make_batch()).keys() == ruled
    assert {field.name for field in dataclasses.fields(SamplingMetadata)} == METADATA_RULES.keys()


def state(batch: Any) -> Iterator[tuple[str, str, Any]]:
    """(request, field, value) of each row, as tensors and arrays are comparable: as lists."""
    rules = dict(ROW_RULES) | ({} if batch.is_pooling_model else SAMPLING_RULES)
    for row, request in enumerate(batch.req_ids):
        for name, rule in rules.items():
            yield request, name, plain(rule(batch, row, request))
        for name, rule in METADATA_RULES.items():
            if not batch.is_pooling_model:
                value = rule(batch.sampling_metadata, row, request)
                yield request, f"sampling_metadata.{name}", plain(value)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def assert_isolated(batch: IsolatedInputBatch, requests: Mapping[str, CachedRequestState]) -> None:
    """``batch`` is as one to which its requests came by themselves, in the order of its rows."""
    fresh = make_batch(pools=batch.is_pooling_model)
    for request in batch.req_ids:
        fresh.add_request(requests[request])
    for request in batch.req_ids:
        drafts = {request: list(batch.spec_token_ids[batch.req_id_to_index[request]])}
        fresh.update_req_spec_token_ids(requests[request], drafts)
    fresh.refresh_metadata()
    assert list(state(batch)) == list(state(fresh))
    count = batch.num_reqs
    assert batch.lora_id_to_lora_request == fresh.lora_id_to_lora_request
    for held in (batch.generators, batch.bad_words_token_ids, batch.req_prompt_embeds):
        assert all(row < count for row in held)
    assert not batch.request_lora_mapping[count:].any()
    for table in batch.block_table.block_tables:
        assert not table.get_numpy_array()[count:].any()
    if batch.allowed_token_ids_mask_cpu_tensor is not None:
        assert not batch.allowed_token_ids_mask_cpu_tensor[count:].any()


TOKEN = st.integers(0, VOCABULARY - 1)
FEATURES = {
    "top_p": st.floats(0.1, 0.9),
    "top_k": st.integers(1, 5),
    "min_p": st.floats(0.1, 0.9),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "seed": st.integers(0, 9),
    "logprobs": st.integers(0, 4),
    "logprob_token_ids": st.lists(TOKEN, min_size=1, max_size=3),
    "allowed_token_ids": st.lists(TOKEN, min_size=1, max_size=3),
    "logit_bias": st.dictionaries(TOKEN, st.floats(-5, 5), min_size=1, max_size=3),
    "min_tokens": st.integers(1, 8),
    "stop_token_ids": st.lists(TOKEN, min_size=1, max_size=2),
    "thinking_token_budget": st.integers(0, 3),
    "bad_words": st.lists(st.lists(TOKEN, min_size=1, max_size=2), min_size=1, max_size=2),
    "lora": st.integers(1, 3),
    "embeds": st.just(True),
}


@st.composite
def options(draw: st.DrawFn, names: list[str]) -> dict[str, Any]:
    """One request, with some of the features ``names``."""
    return {
        "temperature": draw(st.sampled_from([0.0, 0.7])),
        "prompt": draw(st.lists(TOKEN, min_size=1, max_size=9)),
        "output": draw(st.lists(TOKEN, max_size=6)),
        **{name: draw(FEATURES[name]) for name in names if draw(st.booleans())},
    }


def make_request(name: str, wish: Mapping[str, Any], *, pools: bool = False) -> CachedRequestState:
    options = dict(wish)
    prompt, output = options.pop("prompt"), options.pop("output")
    embeds, lora = options.pop("embeds", False), options.pop("lora", 0)
    bad_words = options.pop("bad_words", None)
    params = None if pools else SamplingParams(**options, max_tokens=9)
    if params is not None:
        params._bad_words_token_ids = bad_words
    seeded = params is not None and params.seed is not None
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=None if embeds else prompt,
        prompt_embeds=torch.ones(len(prompt), 2) if embeds else None,
        mm_features=[],
        sampling_params=params,
        pooling_params=PoolingParams(task="embed") if pools else None,
        generator=torch.Generator().manual_seed(params.seed) if params and seeded else None,
        block_ids=([*range(1, 2 + len(prompt) // 4)], [len(prompt)]),
        num_computed_tokens=len(prompt) - 1,
        output_token_ids=output,
        lora_request=LoRARequest(f"adapter-{lora}", lora, "nowhere") if lora else None,
    )


class Update(NamedTuple):
    """The changes of one step."""

    ends: set[int]
    """Rows that are left."""
    arrivals: list[dict[str, Any]]
    swapped: tuple[int, int]
    drafts: list[int]


@st.composite
def histories(draw: st.DrawFn) -> list[Update]:
    """Steps over requests with the same few features, each of which about half of them have."""
    features = st.sets(st.sampled_from(sorted(FEATURES)), min_size=2, max_size=4)
    names = sorted(draw(features))
    row = st.integers(0, ROWS - 1)
    update = st.builds(
        Update,
        ends=st.sets(row),
        arrivals=st.lists(options(names), max_size=ROWS),
        swapped=st.tuples(row, row),
        drafts=st.lists(TOKEN, max_size=2),
    )
    return draw(st.lists(update, min_size=3, max_size=6))


@pytest.mark.parametrize("pools", [False, True])
@settings(max_examples=60, deadline=None)
@given(history=histories())
def test_a_row_has_the_state_of_its_request(history: list[Update], pools: bool) -> None:
    """Updates as a step makes them: ends, arrivals, moves into holes, swaps, drafts."""
    batch, requests, gone = make_batch(pools=pools), dict[str, CachedRequestState](), list[str]()
    for update in history:
        left = [name for row, name in enumerate(batch.req_ids) if row in update.ends]
        for name in left:
            batch.remove_request(name)
        # Of those that left some come back, as preempted requests do.
        again, gone = gone[: ROWS - batch.num_reqs], left
        for name in again[::2]:
            batch.add_request(requests[name])
        for wish in update.arrivals[: ROWS - batch.num_reqs]:
            name = str(len(requests))
            requests[name] = make_request(name, wish, pools=pools)
            batch.add_request(requests[name])
        batch.condense()
        if max(update.swapped) < batch.num_reqs and len(set(update.swapped)) == 2:
            batch.swap_states(*update.swapped)
        if batch.num_reqs:
            first = batch.req_ids[0]
            batch.update_req_spec_token_ids(requests[first], {first: update.drafts})
        batch.refresh_metadata()
        assert_isolated(batch, requests)
