"""With pipeline stages, steps and drafts leave out requests whose step has not ended."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rbln_backend.scheduler.priorities import Rows
from rbln_backend.scheduler.scheduler import drafts_to_check, rows_of_other_steps
from rbln_backend.scheduler.steps import with_drafts


def request(name: str, computed: int, status: RequestStatus = RequestStatus.RUNNING) -> Request:
    """A request of 5 tokens."""
    made = Request(name, [7] * 5, SamplingParams(max_tokens=9), None)
    made.num_computed_tokens, made.status = computed, status
    return made


def test_a_step_takes_the_first_requests_that_no_stage_computes() -> None:
    # Of the first a stage computes a token, of the second two drafts as well.
    rows = Rows([request("a", 5), request("b", 7), *(request(name, 4) for name in "cde")])
    assert rows_of_other_steps(rows, 2) == ({"a", "b", "e"}, True)
    assert rows_of_other_steps(rows, 4) == ({"a", "b"}, False)


def test_drafts_are_of_requests_that_decode() -> None:
    requests = {
        "decodes": request("decodes", 4),
        "computed": request("computed", 5),
        "preempted": request("preempted", 4, RequestStatus.PREEMPTED),
        "ended": request("ended", 4, RequestStatus.FINISHED_STOPPED),
    }
    names = [*requests, "gone"]
    output = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)})
    assert drafts_to_check(with_drafts(output, None), requests) is None
    drafted = with_drafts(output, DraftTokenIds(names, [[n] for n in range(len(names))]))
    drafts = drafts_to_check(drafted, requests)
    assert drafts is not None
    assert (drafts.req_ids, drafts.draft_token_ids) == (["decodes"], [[0]])
