"""Tokens that JSON forbids."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from rbln_backend.grammar.backend import StepMasks
from rbln_backend.grammar.json_compiler import tokens_without_controls
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.worker.sampling import GrammarMask


def test_tokens_with_control_characters_are_known() -> None:
    tokens = [b"a", b"\x00", b"b\n", b"\tc", b"", b"\x7f", "é".encode()] * 9
    for allowed in (b"\n", b"\n\r\t"):
        bits = tokens_without_controls(tokens, allowed)
        assert bits.nbytes == 8
        for index, token in enumerate(tokens):
            is_legal = all(byte >= 32 or byte in allowed for byte in token)
            assert bool(bits[index // 32] >> (index % 32) & 1) is is_legal


# ------------------------------------------------------------------------------------- grammar mask
NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [{}, {"a": [5], "c": [1, 2]}], ids=["plain", "drafts"])
@pytest.mark.parametrize("vocabulary", [64, 70])
def test_rows_are_masked_as_vllm_masks_them(
    dtype: torch.dtype, drafts: dict[str, list[int]], vocabulary: int
) -> None:
    rng = np.random.default_rng(1)
    # "gone" has left the batch; "b" has no grammar.
    constrained = ["d", "gone", "a", "c"]
    rows = sum(1 + len(drafts.get(name, ())) for name in constrained)
    bits = rng.integers(-(2**31), 2**31, (rows, -(-vocabulary // 32)), dtype=np.int32)
    bits[0] = -1
    grammar = GrammarOutput(constrained, bits)
    scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    batch: Any = SimpleNamespace(
        req_ids=NAMES, req_id_to_index={name: row for row, name in enumerate(NAMES)}
    )
    count = sum(1 + len(drafts.get(name, ())) for name in NAMES)
    logits = torch.randn(count, vocabulary, generator=torch.manual_seed(0)).to(dtype)
    expected = logits.clone()
    apply_grammar_bitmask(scheduled, grammar, batch, expected)
    found = GrammarMask(MetricsBoard(None, "test")).apply(scheduled, grammar, batch, logits)
    assert torch.equal(found, expected)
    assert torch.isinf(found).any()


# --------------------------------------------------------------------------------------- step masks
class Grammar(StructuredOutputGrammar):
    """One whose masks are made by a function, and of which nothing else is asked."""

    accept_tokens = validate_tokens = rollback = reset = fill_bitmask = None  # type: ignore[assignment]

    def __init__(self, fill: Callable[[Any, int], None]) -> None:
        self.fill_bitmask = fill  # type: ignore[method-assign]

    def is_terminated(self) -> bool:
        return False


def request(fill: Callable[[Any, int], None], **fields: Any) -> Any:
    return SimpleNamespace(
        **{"use_structured_output": True, "is_prefill_chunk": False}
        | {"sampling_params": SimpleNamespace(ignore_eos=False)}
        | {"structured_output_request": SimpleNamespace(grammar=Grammar(fill))}
        | fields
    )


def step(*names: str, **fields: Any) -> Any:
    return SimpleNamespace(
        **{"has_structured_output_requests": True, "pending_structured_output_tokens": False}
        | {"scheduled_spec_decode_tokens": {}, "num_scheduled_tokens": dict.fromkeys(names, 1)}
        | fields
    )


def numbered(number: int) -> Callable[[Any, int], None]:
    return lambda bits, row: bits.__setitem__(row, number)


class Fixture:
    """Masks of given requests; `filled_all` lists the steps whose masks were made at the end."""

    def __init__(self, folder: Path) -> None:
        self.requests: dict[str, Any] = {}
        self.filled_all: list[Any] = []
        self.board = MetricsBoard(folder, "masks")
        self.manager: Any = SimpleNamespace(
            backend=SimpleNamespace(allocate_token_bitmask=lambda n: torch.full((n, 3), -1)),
            _get_constraint_start=lambda *_: 0,
        )
        self.masks = StepMasks(self.manager, self.requests, self.filled_all.append, self.board)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(tmp_path)
    yield made
    made.masks.close()


def test_masks_are_filled_between_schedule_and_sampling(fixture: Fixture) -> None:
    began, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def fill(bits: Any, row: int) -> None:
        threads.append(threading.current_thread())
        began.set()
        assert may_end.wait(10)
        bits[row] = 5

    fixture.requests |= {"a": request(fill), "b": request(numbered(6))}
    fixture.requests["c"] = request(numbered(0), use_structured_output=False)
    output = step("a", "c", "b")
    fixture.masks.begin(output)
    assert began.wait(10)
    # Here the graph runs, and ends before the mask is there.
    threading.Timer(0.05, may_end.set).start()
    found: Any = fixture.masks.take(output)
    assert found.structured_output_request_ids == ["a", "b"]
    assert found.grammar_bitmask.tolist() == [[5] * 3, [6] * 3]
    assert threads and threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    "fields",
    [
        {"scheduled_spec_decode_tokens": {"a": [1]}},
        {"pending_structured_output_tokens": True},
        {"has_structured_output_requests": False},
    ],
)
def test_masks_that_need_what_is_not_known_yet_are_filled_at_the_end(
    fixture: Fixture, fields: Any
) -> None:
    fixture.requests["a"] = request(numbered(1))
    output = step("a", **fields)
    fixture.masks.begin(output)
    assert fixture.filled_all == []
    fixture.masks.take(output)
    assert fixture.filled_all == [output]


def test_a_step_gets_no_masks_of_another(fixture: Fixture) -> None:
    fixture.requests["a"] = request(numbered(1))
    first, second = step("a"), step("a")
    fixture.masks.begin(first)
    fixture.masks.take(second)
    assert fixture.filled_all == [second]


def test_a_failed_fill_fails_the_step(fixture: Fixture) -> None:
    def fill(*_: Any) -> None:
        raise TimeoutError("no grammar")

    fixture.requests["a"] = request(fill)
    output = step("a")
    fixture.masks.begin(output)
    with pytest.raises(TimeoutError, match="no grammar"):
        fixture.masks.take(output)


def test_ends_are_withheld_under_ignore_eos_while_anything_else_may_follow(
    fixture: Fixture,
) -> None:
    # Token 3 ends a turn; 5 is a stop id of the request.
    params = SimpleNamespace(ignore_eos=True, all_stop_token_ids={3, 5}, stop_token_ids=[5])
    rows = [[0b101000, 0, 1], [0b001000, 0, 0], [0b101000, 0, 0], [-1, -1, -1]]
    output = step(*"abcde", scheduled_spec_decode_tokens={"d": [7, 8]})
    for name in "abcd":
        fixture.requests[name] = request(numbered(0), sampling_params=params)
    fixture.requests["e"] = request(numbered(0))
    given = [*rows, rows[0], rows[1], rows[0]]
    grammar = GrammarOutput([*"abcde"], np.array(given, dtype=np.int32))
    masks = StepMasks(fixture.manager, fixture.requests, lambda _: grammar, fixture.board)
    found = masks.take(output)
    assert found is not None
    expected = [[0b100000, 0, 1], rows[1], [0b100000, 0, 0], rows[3], [0b100000, 0, 1]]
    assert found.grammar_bitmask.tolist() == [*expected, rows[1], rows[0]]
    assert masks.get_end(fixture.requests["a"], [7, 3, 9]) == 2
    assert masks.get_end(fixture.requests["a"], [7, 5]) is None
    assert masks.get_end(fixture.requests["e"], [7, 3]) is None
    masks.close()
