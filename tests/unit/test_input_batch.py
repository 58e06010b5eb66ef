"""A row of a batch holds its request's state and nothing else, after any arrivals, ends and moves.

Every field of vLLM's batch and of its sampling metadata has a rule below. A field that a release
adds has none, and the test of the rules fails until it is classified.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.pooler.seqwise import LastPool, MeanPool, SequencePooler
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.lora.slots import NO_ADAPTER, SlotMask, SlotNumbers
from rbln_backend.worker.batch import IsolatedInputBatch
from rbln_backend.worker.inputs import KvGroup, PagedInputs, StepInputs, WindowInputs
from rbln_backend.worker.pooling import HostPooler

ROWS, VOCABULARY, CONTEXT = 4, 23, 24
CPU = torch.device("cpu")
THINKING = SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2])


def make_batch(*, pools: bool = False) -> IsolatedInputBatch:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processors = [
        kind(config, CPU, False)  # type: ignore[arg-type]  # of a configuration they read one number
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    ]
    sizes = {"max_num_reqs": ROWS, "max_model_len": CONTEXT, "max_num_batched_tokens": CONTEXT}
    blocks = {"block_sizes": [4, 8], "kernel_block_sizes": [4, 8], "max_num_blocks_per_req": [6, 3]}
    return IsolatedInputBatch(
        **sizes,
        **blocks,
        device=CPU,
        vocab_size=VOCABULARY,
        num_spec_tokens=2,
        is_pooling_model=pools,
        reasoning_config=THINKING,  # of which it reads these two
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


# -------------------------------------------------------------------------------------- step inputs
PAGED = KvGroup(layer_names=("a",), block_size=16, width=3, is_window=False, one_block=False)
WINDOW = KvGroup(layer_names=("b", "c"), block_size=24, width=1, is_window=True, one_block=False)


def allocate(
    phase: Phase, bucket: int, prompts: int = 1
) -> tuple[StepInputs, PagedInputs, WindowInputs]:
    spec = GraphSpec.of(phase, bucket, prompts=prompts)
    inputs = StepInputs.allocate(spec, [PAGED, WINDOW])
    paged, window = inputs.groups
    assert isinstance(paged, PagedInputs)
    assert isinstance(window, WindowInputs)
    for array in (inputs.token_ids, inputs.positions, paged.seq_idx, paged.block_tables):
        array.fill(99)
    for array in (window.cache_seq_len, window.cache_offset, window.block_tables):
        array.fill(99)
    return inputs, paged, window


def test_prefill_chunk_in_the_second_block() -> None:
    inputs, paged, window = allocate(Phase.PREFILL, 8)
    rows = [np.array([[7, 4, 0, 0]]), np.array([[2]])]
    inputs.fill_prefill([np.arange(5, 10)], np.array([20]), block_rows=rows)
    assert inputs.token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert inputs.positions.tolist() == [[20, 21, 22, 23, 24, 0, 0, 0]]
    assert inputs.token_indices.tolist() == [4]
    assert paged.seq_idx.tolist() == [[20]]
    assert inputs.tensors["block_tables.0"].tolist() == [7, 4, 0]
    assert window.cache_seq_len.tolist() == [[20]]
    assert window.cache_offset.tolist() == [[25]]
    assert inputs.tensors["local_block_tables.1"].tolist() == [2]
    assert "query_counts" not in inputs.tensors
    # A full window counts the tokens that it holds.
    inputs.fill_prefill([np.arange(5, 10)], np.array([40]), block_rows=rows)
    assert (window.cache_seq_len.tolist(), window.cache_offset.tolist()) == ([[24]], [[29]])


def test_the_prompts_of_a_chunk_are_concatenated() -> None:
    inputs, paged, window = allocate(Phase.PREFILL, 8, prompts=3)
    inputs.query_counts.fill(99)
    rows = [np.array([[7, 4, 0, 0], [3, 0, 0, 0]]), np.array([[2], [1]])]
    prompts = [np.array([5, 6, 7]), np.array([8, 9])]
    inputs.fill_prefill(prompts, np.array([30, 0]), block_rows=rows)
    assert inputs.token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert inputs.positions.tolist() == [[30, 31, 32, 0, 1, 0, 0, 0]]
    assert inputs.tensors["token_indices"].tolist() == [2, 4, 0]
    assert inputs.tensors["query_counts"].tolist() == [3, 2, 0]
    assert inputs.tensors["seq_idx.0"].tolist() == [[30], [0], [0]]
    assert inputs.tensors["block_tables.0"].tolist() == [[7, 4, 0], [3, 0, 0], [0, 0, 0]]
    assert window.cache_seq_len.tolist() == [[24], [0], [0]]
    assert window.cache_offset.tolist() == [[27], [2], [0]]
    assert inputs.tensors["local_block_tables.1"].tolist() == [2, 1, 0]
    counts = {part.metadata.query_counts for part in (paged, window)}
    assert counts == {inputs.tensors["query_counts"]}
    inputs.fill_idle()
    assert all(not tensor.any() for tensor in inputs.tensors.values())


def test_decode_pads_rows_with_the_null_block() -> None:
    inputs, paged, window = allocate(Phase.DECODE, 4)
    rows = [np.array([[3, 0, 0, 0], [5, 6, 8, 0]]), np.array([[1, 0], [4, 0]])]
    inputs.fill_decode(np.array([11, 12]), np.array([2, 40]), rows)
    assert inputs.token_ids.tolist() == [[11], [12], [0], [0]]
    assert inputs.positions.tolist() == [[2], [40], [0], [0]]
    assert paged.seq_idx.tolist() == [[2], [40], [0], [0]]
    assert paged.block_tables.tolist() == [[3, 0, 0], [5, 6, 8], [0, 0, 0], [0, 0, 0]]
    assert window.cache_seq_len.tolist() == [[2], [24], [0], [0]]
    assert inputs.tensors["seq_idx.0"].tolist() == [[2], [40], [0], [0]]
    assert inputs.metadata == {"a": paged.metadata, "b": window.metadata, "c": window.metadata}
    # A padded row has no new token: its offset equals its length.
    assert window.cache_offset.tolist() == [[3], [25], [0], [0]]
    assert window.block_tables.tolist() == [[1], [4], [0], [0]]
    # Also the row of which a chunk computes logits: no other would be in the graph's range.
    inputs.token_indices.fill(7)
    inputs.fill_idle()
    assert all(not tensor.any() for tensor in inputs.tensors.values())


def test_adapter_slots_are_per_request_and_initially_none() -> None:
    without = StepInputs.allocate(GraphSpec.of(Phase.DECODE, 4), [PAGED])
    assert "lora_slots" not in without.tensors
    for phase, rows in ((Phase.DECODE, 4), (Phase.PREFILL, 1)):
        spec = GraphSpec.of(phase, 4)
        inputs = StepInputs.allocate(spec, [PAGED], row_input=SlotNumbers())
        assert inputs.tensors["lora_slots"].tolist() == [-1] * rows
        inputs.fill_adapters([2])
        assert inputs.tensors["lora_slots"].tolist() == [2, -1, -1, -1][:rows]
        inputs.fill_idle()
        assert inputs.tensors["lora_slots"].tolist() == [-1] * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_a_row_covers_its_slot(dtype: torch.dtype) -> None:
    mask = SlotMask(2, 3, dtype)
    tensor = mask.allocate(4)
    assert (tensor.shape, tensor.dtype) == ((4, 1, 6), dtype)
    for slots in ([1, NO_ADAPTER, 0], [NO_ADAPTER, 1], []):
        mask.fill(tensor, slots)
        rows = [[0] * 6, [1] * 3 + [0] * 3, [0] * 3 + [1] * 3]
        padded = [*slots, *[NO_ADAPTER] * (4 - len(slots))]
        assert tensor[:, 0].tolist() == [rows[slot + 1] for slot in padded]


def test_the_mask_covers_the_rows_of_every_rank() -> None:
    spec = GraphSpec.of(Phase.DECODE, 4)
    inputs = StepInputs.allocate(spec, [PAGED], masked_ranks=2)
    inputs.fill_mask((3, 0))
    assert inputs.tensors["tokens_mask"].flatten().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    inputs.fill_mask((1, 4))
    assert inputs.tensors["tokens_mask"].flatten().tolist() == [1, 0, 0, 0, 1, 1, 1, 1]
    assert inputs.tensors["tokens_mask"].shape == (8, 1)
    without = StepInputs.allocate(spec, [PAGED])
    without.fill_mask((3,))
    assert "tokens_mask" not in without.tensors


# -------------------------------------------------------------------------------------- host pooler
def host_pooler(pooling: object, *, reuses_prefixes: bool = False) -> HostPooler:
    model = nn.Module()
    model.pooler = SequencePooler(pooling=pooling, head=lambda rows, _: rows)
    return HostPooler(model, reuses_prefixes=reuses_prefixes)


def pooling_request(name: str, num_tokens: int) -> CachedRequestState:
    params = PoolingParams(task="embed")
    empty = {"mm_features": [], "sampling_params": None, "generator": None, "block_ids": ()}
    empty |= {"num_computed_tokens": 0, "output_token_ids": []}
    ids = list(range(num_tokens))
    return CachedRequestState(req_id=name, prompt_token_ids=ids, pooling_params=params, **empty)


def metadata_of(request: CachedRequestState) -> PoolingMetadata:
    return PoolingMetadata(
        prompt_lens=torch.tensor([request.num_prompt_tokens]),
        prompt_token_ids=None,
        prompt_token_ids_cpu=None,
        pooling_params=[request.pooling_params],
        pooling_states=[PoolingStates()],
    )


def run(pooler: HostPooler, request: CachedRequestState, rows: Tensor, chunk: int) -> Tensor:
    """Feed ``rows`` through one buffer that every chunk overwrites, and pool."""
    buffer = torch.empty(chunk, rows.shape[1])
    for start in range(request.num_computed_tokens, len(rows), chunk):
        part = rows[start : start + chunk]
        buffer[: len(part)] = part
        request.num_computed_tokens = start
        is_last = start + len(part) == len(rows)
        pooler.add(request, buffer[: len(part)], is_last=is_last)
    result = pooler.pool(request, metadata_of(request))
    buffer.fill_(float("nan"))
    return result


HIDDEN_ROWS = torch.arange(40, dtype=torch.float32).view(10, 4) ** 2


@pytest.mark.parametrize("chunk", [3, 5, 10, 16])
def test_a_pooler_of_all_rows_gets_all_rows(chunk: int) -> None:
    result = run(host_pooler(MeanPool()), pooling_request("a", 10), HIDDEN_ROWS, chunk)
    assert torch.equal(result, HIDDEN_ROWS.mean(0))
    # A result is a copy.
    third = host_pooler(lambda rows, _: [rows[2]])
    assert torch.equal(run(third, pooling_request("a", 10), HIDDEN_ROWS, 10), HIDDEN_ROWS[2])


@pytest.mark.parametrize("chunk", [3, 10])
def test_a_last_row_pooler_gets_the_last_chunk(chunk: int) -> None:
    request = pooling_request("a", 10)
    # After a prefix hit the first rows never come.
    request.num_computed_tokens = 4
    result = run(host_pooler(LastPool(), reuses_prefixes=True), request, HIDDEN_ROWS, chunk)
    assert torch.equal(result, HIDDEN_ROWS[-1])


def test_a_preempted_prompt_starts_over() -> None:
    pooler, request = host_pooler(MeanPool()), pooling_request("a", 10)
    pooler.add(request, torch.full((6, 4), 99.0), is_last=False)
    assert torch.equal(run(pooler, request, HIDDEN_ROWS, 5), HIDDEN_ROWS.mean(0))
    # It needs all of them.
    with pytest.raises(UnsupportedModelError, match="--no-enable-prefix-caching"):
        host_pooler(MeanPool(), reuses_prefixes=True)


def test_rows_of_an_aborted_prompt_are_removed() -> None:
    pooler, request = host_pooler(MeanPool()), pooling_request("a", 10)
    pooler.add(request, torch.full((6, 4), 99.0), is_last=False)
    pooler.remove({"a", "never seen"})
    # The same id again, after a prefix hit of six tokens: nothing of the first is left.
    request.num_computed_tokens = 6
    pooler.add(request, HIDDEN_ROWS[:4], is_last=True)
    assert torch.equal(
        pooler.pool(pooling_request("a", 4), metadata_of(pooling_request("a", 4))),
        HIDDEN_ROWS[:4].mean(0),
    )
