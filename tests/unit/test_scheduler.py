"""The device's scheduling rules."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rbln_backend.buckets import BucketTable, ChunkPlan
from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.priorities import PrefillOrder, Rows
from rbln_backend.scheduler.prompts import StepBounds, prompts_together
from rbln_backend.scheduler.scheduler import QueueExpiry, drafts_to_check, rows_of_other_steps
from rbln_backend.scheduler.steps import AGING, can_decode, decode_share, with_drafts


@dataclass
class Decoding:
    """A request of 10 prompt tokens that may answer with 5."""

    num_computed_tokens: int
    num_tokens: int
    num_output_placeholders: int = 0
    pooling_params: object = None
    num_prompt_tokens: int = 10
    max_tokens: int = 5


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(Decoding(10, 11), True, id="its token is known"),
        pytest.param(Decoding(11, 11), False, id="a running step computes its token"),
        pytest.param(Decoding(10, 10, 1), True, id="the last chunk makes its token"),
        pytest.param(Decoding(11, 10, 2), True, id="two steps have not ended"),
        pytest.param(Decoding(13, 13, 1), True, id="one more after that in flight"),
        pytest.param(Decoding(14, 14, 1), False, id="the token in flight is its last"),
        pytest.param(Decoding(4, 10), False, id="its prompt needs a chunk"),
    ],
)
def test_can_decode(request_: Decoding, expected: bool) -> None:
    assert can_decode(request_) is expected


@pytest.mark.parametrize(
    ("num_decoding", "max_num_seqs", "stages", "share"),
    [
        pytest.param(5, 8, 1, 5, id="one stage takes all"),
        pytest.param(8, 8, 2, 4, id="half each"),
        pytest.param(3, 8, 2, 2, id="of few an equal part, rounded up"),
        pytest.param(1, 8, 4, 1, id="never none"),
        pytest.param(9, 9, 2, 4, id="never more than the largest bucket"),
    ],
)
def test_stages_share_what_decodes(
    num_decoding: int, max_num_seqs: int, stages: int, share: int
) -> None:
    assert decode_share(num_decoding, max_num_seqs, stages) == share


# ------------------------------------------------------------------------------------ prefill order
CHUNK = 64


class Reader:
    """Computes chunks of prompts in the order under test; one prompt per step."""

    def __init__(self, *, by_priority: bool = False) -> None:
        self.board = MetricsBoard(None, "scheduler0")
        self.hits: dict[str, int] = {}
        self.now = 0.0
        hit = lambda request: self.hits.get(request.request_id, 0)  # noqa: E731
        options: dict[str, Any] = {"by_priority": by_priority, "clock": lambda: self.now}
        self.order = PrefillOrder(hit, self.board, **options)
        self.unread: list[Request] = []
        self.done: list[str] = []
        self.log: list[tuple[str, int]] = []
        """Name and tokens of each chunk."""

    def add(self, name: str, tokens: int, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=2)
        request = Request(name, [0] * tokens, params, None, priority=priority)
        self.unread.append(request)
        self.order.add(request)
        return request

    def step(self) -> None:
        running = [r for r in self.unread if r.num_computed_tokens]
        request = self.order.first(running, 1, lambda request: True)[0]
        request.num_computed_tokens = request.num_computed_tokens or self.hits.get(
            request.request_id, 0
        )
        tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens)
        self.order.computed([request], tokens, self.unread)
        request.num_computed_tokens += tokens
        self.log.append((request.request_id, tokens))
        self.now += 1
        if request.num_computed_tokens == request.num_tokens:
            self.unread.remove(request)
            self.order.ended(request.request_id)
            self.done.append(request.request_id)

    def to_the_end(self) -> list[str]:
        while self.unread:
            self.step()
        return self.done


def test_the_fewest_tokens_left_come_first() -> None:
    reader = Reader()
    reader.add("document", 300)
    reader.step()
    reader.add("turn", 40)
    reader.add("page", 180)
    reader.hits["known"] = 490
    reader.add("known", 500)
    # After its first chunk the document has 236 tokens left.
    assert reader.to_the_end() == ["known", "turn", "page", "document"]
    assert reader.board.value("rbln_prefill_overtaken_total") == 3
    assert reader.board.value("rbln_prefill_overtaken_seconds") == 3


def test_equal_prompts_keep_their_order_of_arrival() -> None:
    reader = Reader()
    names = [f"{number:02}" for number in range(20)]
    for name in names:
        reader.add(name, 100)
    assert reader.to_the_end() == names
    assert reader.board.value("rbln_prefill_overtaken_total") == 0


def test_priority_comes_before_length() -> None:
    reader = Reader()
    reader.add("short", 30)
    reader.add("first", 64, FIRST_PRIORITY)
    reader.add("later", 20, priority=7)
    assert reader.to_the_end() == ["first", "later", "short"]
    ranked = Reader(by_priority=True)
    ranked.add("short", 30)
    ranked.add("later", 20, priority=7)
    ranked.add("urgent", 64, priority=-3)
    assert ranked.to_the_end() == ["urgent", "short", "later"]


def test_a_request_that_cannot_begin_stays_and_background_is_not_in_it() -> None:
    reader = Reader()
    background = reader.add("background", 10, BACKGROUND_PRIORITY)
    blocked, other = reader.add("blocked", 10), reader.add("other", 20)
    assert reader.order.first([], 1, lambda request: request is other) == [other]
    assert reader.order.first([], 4, lambda request: True) == [blocked, other]
    reader.order.ended(background.request_id)


def test_a_preempted_request_is_there_once() -> None:
    reader = Reader()
    request = reader.add("preempted", 10)
    for _ in range(3):
        reader.order.computed([request], 10, [])
        assert reader.order.first([], 2, lambda request: True) == []
        reader.order.add(request)
        assert reader.order.first([], 2, lambda request: True) == [request]


@pytest.mark.parametrize("seed", range(20))
def test_later_prompts_delay_a_prompt_by_a_bounded_number_of_tokens(seed: int) -> None:
    """A stream of short prompts that takes more than all chunks would stop a long one forever."""
    rng, reader = random.Random(seed), Reader()
    sizes, delays = dict[str, int](), dict[str, int]()
    while len(reader.log) < 400:
        for _ in range(rng.choice([0, 1, 1, 2])):
            name = f"{len(sizes):04}"
            sizes[name] = rng.choice([5, 20, 40, 60, 200, 1000])
            reader.add(name, sizes[name])
        if not reader.unread:
            continue
        unread = [request.request_id for request in reader.unread]
        reader.step()
        computed, tokens = reader.log[-1]
        for name in unread:
            if name < computed:
                delays[name] = delays.get(name, 0) + tokens
    assert all(delay <= AGING * sizes[name] + CHUNK for name, delay in delays.items())
    assert max(delays.values()) > CHUNK


# ------------------------------------------------------------------------------------------ sharing
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


# ------------------------------------------------------------------------------------------- expiry
@dataclass
class Clock:
    now: float = 10.0

    def __call__(self) -> float:
        return self.now


def test_requests_are_named_once_when_their_time_is_over() -> None:
    clock = Clock()
    expiry = QueueExpiry(2.0, clock)
    expiry.add("a", waited_s=0.0)
    clock.now += 1.5
    expiry.add("b", waited_s=0.5)
    assert list(expiry.take_due()) == []
    clock.now = 12.0
    assert list(expiry.take_due()) == ["a"]
    clock.now = 12.9
    assert list(expiry.take_due()) == []
    clock.now = 13.0
    assert list(expiry.take_due()) == ["b"]
    assert list(expiry.take_due()) == []


def test_another_clock_that_jumped_does_no_harm() -> None:
    clock = Clock()
    expiry = QueueExpiry(2.0, clock)
    expiry.add("future", waited_s=-3600.0)
    clock.now += 1.9
    assert list(expiry.take_due()) == []
    clock.now += 0.2
    assert list(expiry.take_due()) == ["future"]
    expiry.add("past", waited_s=3600.0)
    assert list(expiry.take_due()) == ["past"]
    # Without a limit nothing is kept.
    endless = QueueExpiry(0.0)
    endless.add("a", waited_s=1e9)
    assert list(endless.take_due()) == []


# ------------------------------------------------------------------------------------- stage drafts
def staged(name: str, computed: int, status: RequestStatus = RequestStatus.RUNNING) -> Request:
    made = Request(name, [7] * 5, SamplingParams(max_tokens=9), None)
    made.num_computed_tokens, made.status = computed, status
    return made


def test_a_step_takes_the_first_requests_that_no_stage_computes() -> None:
    # Of the first a stage computes a token, of the second two drafts as well.
    rows = Rows([staged("a", 5), staged("b", 7), *(staged(name, 4) for name in "cde")])
    assert rows_of_other_steps(rows, 2) == ({"a", "b", "e"}, True)
    assert rows_of_other_steps(rows, 4) == ({"a", "b"}, False)


def test_drafts_are_of_requests_that_decode() -> None:
    requests = {
        "decodes": staged("decodes", 4),
        "computed": staged("computed", 5),
        "preempted": staged("preempted", 4, RequestStatus.PREEMPTED),
        "ended": staged("ended", 4, RequestStatus.FINISHED_STOPPED),
    }
    names = [*requests, "gone"]
    output = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)})
    assert drafts_to_check(with_drafts(output, None), requests) is None
    drafted = with_drafts(output, DraftTokenIds(names, [[n] for n in range(len(names))]))
    drafts = drafts_to_check(drafted, requests)
    assert drafts is not None
    assert (drafts.req_ids, drafts.draft_token_ids) == (["decodes"], [[0]])
