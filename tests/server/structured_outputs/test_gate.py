"""The gate without an engine: constraints of bodies, limits, cached verdicts, processes."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from rbln_backend.grammar import lark
from rbln_backend.grammar.lark import LarkGrammar
from server import bounds
from server.errors import (
    InvalidGrammarError,
    InvalidSchemaError,
    InvalidValueError,
    MissingFieldError,
    NotTriedError,
    OverloadedError,
    RequestError,
    UnsupportedFieldError,
)
from server.host.job_pool import JobCrashedError, JobSpentError, JobTimeoutError, PoolFullError
from server.structured_outputs.constraint import (
    ANY_OBJECT,
    Constraint,
    ConstraintKind,
    get_constraints,
    job_key,
)
from server.structured_outputs.gate import GrammarGate
from server.structured_outputs.grammars import SchemaRules
from server.structured_outputs.trial import TrialVerdict, do_job, job_bytes
from server.wire import Endpoint
from tests.server.scripted import ScriptedEngine, ScriptedFrontend, ScriptedLauncher, running
from tests.server.structured_outputs.walks import grammar_of, vocabulary

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
RULES = SchemaRules(compact=False, closed=True)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def chat_format(**inner: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **inner}}}


@pytest.mark.parametrize(
    ("endpoint", "body", "found"),
    [
        ("CHAT", chat_format(schema=SCHEMA),
         [("json", TEXT, "response_format.json_schema.schema")]),
        ("COMPLETION", {"response_format": {"type": "json_object"}},
         [("json", ANY_OBJECT, "response_format")]),
        ("CHAT", {"response_format": {"type": "text"}}, []),
        ("CHAT", {"response_format": TAG},
         [("structural_tag", json.dumps(TAG), "response_format")]),
        ("RESPONSES", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
         [("json", TEXT, "text.format.schema")]),
        ("MESSAGES", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         [("json", TEXT, "output_config.format.schema")]),
        ("CHAT", {"structured_outputs": {"json": SCHEMA}},
         [("json", TEXT, "structured_outputs.json")]),
        ("CHAT", {"structured_outputs": {"json": " {}"}},
         [("json", " {}", "structured_outputs.json")]),
        ("CHAT", {"structured_outputs": {"regex": "a"}},
         [("regex", "a", "structured_outputs.regex")]),
        ("CHAT", {"structured_outputs": {"choice": ["a"]}},
         [("choice", '["a"]', "structured_outputs.choice")]),
        ("CHAT", {"structured_outputs": {"grammar": "g"}},
         [("grammar", "g", "structured_outputs.grammar")]),
        ("CHAT", {"tools": [tool()]}, []),
        ("CHAT", {"tools": [tool()], "tool_choice": "none"}, []),
        ("CHAT", {"tools": [tool(strict=True)]}, [("json", TEXT, "tools[0].function.parameters")]),
        ("CHAT", {"tools": [tool()], "tool_choice": "required"},
         [("json", TEXT, "tools[0].function.parameters")]),
        ("RESPONSES", {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
                       "tool_choice": {"type": "function", "name": "f"}},
         [("json", TEXT, "tools[0].parameters")]),
        ("MESSAGES", {"tools": [{"name": "f", "input_schema": SCHEMA}],
                      "tool_choice": {"type": "any"}}, [("json", TEXT, "tools[0].input_schema")]),
        ("TOKENIZE", {"structured_outputs": {"regex": "a"}}, []),
        # The request models refuse wrong types.
        ("CHAT", {"structured_outputs": {"choice": [1]}}, []),
        ("CHAT", {"response_format": "json", "structured_outputs": 5, "tools": {}}, []),
    ],
)  # fmt: skip
def test_constraints_are_found(endpoint: str, body: dict[str, Any], found: list[Any]) -> None:
    jobs = get_constraints(Endpoint[endpoint], body)
    assert [(c.kind.value, c.text, c.param) for job in jobs for c in job] == found


def test_strict_false_asks_for_the_best_only() -> None:
    for strict, exact in ((None, True), (True, True), (False, False)):
        body = (
            chat_format(schema=SCHEMA)
            if strict is None
            else chat_format(schema=SCHEMA, strict=strict)
        )
        assert get_constraints(Endpoint.CHAT, body)[0][0].exact is exact
    required = {"tools": [tool(), tool(strict=True)], "tool_choice": "required"}
    for rewrites in (False, True):
        jobs = get_constraints(Endpoint.CHAT, required, rewrites_tools=rewrites)
        assert [(c.exact, c.tagged) for (c,) in jobs] == [(e, not rewrites) for e in (False, True)]


F, G = ({"type": "function", "name": name, "parameters": SCHEMA} for name in "fg")


@pytest.mark.parametrize(
    ("endpoint", "tools", "choice", "reached"),
    [
        ("CHAT", [tool("f"), tool("g")], "required", [0, 1]),
        ("CHAT", [tool("f"), tool("g")], "auto", []),
        ("CHAT", [tool("f"), tool("g", strict=True)], None, [0, 1]),
        ("CHAT", [tool("f"), tool("g", strict=True)], "none", []),
        ("CHAT", [tool("f"), tool("g")], {"type": "function", "function": {"name": "g"}}, [1]),
        ("RESPONSES", [F, G], {"type": "function", "name": "f"}, [0]),
        # A list guides `auto` as well.
        ("RESPONSES", [F, G], {"type": "allowed_tools", "mode": "auto", "tools": [G]}, [1]),
        ("CHAT", [tool("f"), tool("g")],
         {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("f")]}},
         [0]),
        ("RESPONSES", [F, G], "required", [0, 1]),
        ("MESSAGES", [F, G], {"type": "any"}, []),
        ("MESSAGES", [{"name": n, "input_schema": SCHEMA} for n in "fg"], {"type": "any"}, [0, 1]),
        ("MESSAGES", [{"name": n, "input_schema": SCHEMA} for n in "fg"],
         {"type": "tool", "name": "g"}, [1]),
    ],
)  # fmt: skip
def test_only_tools_that_may_be_called_are_compiled(
    endpoint: str, tools: Any, choice: Any, reached: list[int]
) -> None:
    body = {"tools": tools} | ({} if choice is None else {"tool_choice": choice})
    jobs = get_constraints(Endpoint[endpoint], body)
    assert [int(c.param.removeprefix("tools[").partition("]")[0]) for (c,) in jobs] == reached


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        (chat_format(), MissingFieldError, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, MissingFieldError,
         "response_format.json_schema"),
        ({"structured_outputs": {}}, InvalidValueError, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, InvalidValueError,
         "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, InvalidValueError,
         "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}, **chat_format(schema=SCHEMA)}, InvalidValueError,
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, UnsupportedFieldError,
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
         UnsupportedFieldError, "structured_outputs.disable_any_whitespace"),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_meant(
    body: dict[str, Any], error: type[RequestError], param: str
) -> None:
    with pytest.raises(error) as caught:
        get_constraints(Endpoint.CHAT, body)
    assert caught.value.param == param


def take_all(_kind: str, _text: str) -> list[str]:
    return []


def judge(kind: ConstraintKind, text: str, **options: Any) -> str | None:
    trial = options.pop("trial", take_all)
    job = job_bytes([Constraint(kind, text, "", **options)])
    return do_job(job, trial, RULES).reason


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {"DEPTH": 5, "NODES": 20, "ENUM": 3, "PATTERN": 16}.items():
        monkeypatch.setattr(bounds, f"SCHEMA_MAX_{name}", most)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (ConstraintKind.JSON, "{", "not valid JSON"),
        (ConstraintKind.JSON, "[" * 5000, "nested too deeply"),
        (ConstraintKind.JSON, "5", "must be an object"),
        (ConstraintKind.JSON, json.dumps({"a": {"b": {"c": {"d": {"e": {}}}}}}), "than 5 levels"),
        (ConstraintKind.JSON, json.dumps({"default": list(range(30))}), "more than 20"),
        (ConstraintKind.JSON, '{"enum": [1, 2, 3, 4]}', "4 values; the limit of this server is 3"),
        (ConstraintKind.JSON, json.dumps({"type": "string", "pattern": "a" * 17}), "17 characters"),
        (ConstraintKind.JSON, json.dumps({"patternProperties": {"a" * 17: {}}}), "17 characters"),
        (ConstraintKind.REGEX, "", "empty"),
        (ConstraintKind.REGEX, "a\0", "NUL"),
        (ConstraintKind.REGEX, "a" * 17, "17 characters; the limit of this server is 16"),
        (ConstraintKind.REGEX, r"ab\h", r"'\h' at character 3"),
        (ConstraintKind.GRAMMAR, 'root ::= "\\ud83d"', r"'\ud83d' at character 11"),
        (ConstraintKind.GRAMMAR, 'root ::= [\\xd800-\\U0000DFFF]', r"'\xd800' at character 11"),
        (ConstraintKind.GRAMMAR, 'start: "\\U00110000"', "no character"),
        (ConstraintKind.STRUCTURAL_TAG, "null", "must be an object, got null"),
        (ConstraintKind.STRUCTURAL_TAG, '{"format": {"type": "regex", "pattern": "a\\\\Q"}}',
         r"'\Q' at character 2"),
        (ConstraintKind.STRUCTURAL_TAG, '{"format": {"type": "grammar", "grammar": "\\\\ud83d"}}',
         "surrogate"),
        (ConstraintKind.CHOICE, "[]", "no values"),
        (ConstraintKind.CHOICE, '["a", "b", "c", "d"]', "4 values"),
        (ConstraintKind.GRAMMAR, " ", "empty"),
        (ConstraintKind.STRUCTURAL_TAG, "{", "not valid JSON"),
        (ConstraintKind.STRUCTURAL_TAG, "9" * 5000, "an integer has more than 400 digits"),
        (ConstraintKind.STRUCTURAL_TAG,
         json.dumps({"type": "json_schema", "json_schema": {"$ref": "#"}}), "refers to itself"),
        (ConstraintKind.STRUCTURAL_TAG,
         json.dumps({"format": {"type": "json_schema", "json_schema": {"not": {"const": 1}},
                                "style": "qwen_xml"}}), "'not'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small_limits")
def test_limits_and_form(kind: ConstraintKind, text: str, words: str) -> None:
    assert words in (judge(kind, text) or "")


def test_what_a_trial_says_is_passed_on_plainly() -> None:
    def fail(_kind: str, _text: str) -> list[str]:
        raise RuntimeError(
            "[17:28:27] /project/cpp/a.cc:83: Regex parsing error at position 2: x. \n"
        )

    def warn(_kind: str, _text: str) -> list[str]:
        return ["[17:28:27] /project/cpp/a.cc:8: Warning: 'x' is ignored"]

    assert judge(ConstraintKind.REGEX, "a", trial=fail) == "Regex parsing error at position 2: x"
    assert judge(ConstraintKind.JSON, TEXT, trial=warn) == "'x' is ignored"
    assert judge(ConstraintKind.JSON, TEXT, trial=warn, exact=False) is None


@pytest.mark.usefixtures("small_limits")
def test_best_effort_keeps_the_limits() -> None:
    assert judge(ConstraintKind.JSON, '{"not": {"pattern": "a"}}', exact=False) is None
    assert judge(ConstraintKind.JSON, '{"enum": [1, 2, 3, 4]}', exact=False) is not None
    assert judge(ConstraintKind.JSON, '{"$ref": "#"}', exact=False) is not None
    # A derived one is of any size.
    assert judge(ConstraintKind.JSON, '{"enum": [1, 2, 3, 4]}', derived=True) is None


NAMED_G = {"type": "function", "function": {"name": "g"}}


class ScriptedPool:
    """Answers every job with `outcome` once `go_on` is set."""

    timeout_s = 5.0

    def __init__(self) -> None:
        self.starts = 0
        self.jobs: list[list[Any]] = []
        self.shares: list[int] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.outcome: TrialVerdict | Exception = TrialVerdict(seconds=0.5)

    async def run(self, job: bytes, shares: int = 1) -> bytes:
        read = json.loads(job)
        assert read["shares"] == shares
        self.jobs.append(read["parts"])
        self.shares.append(shares)
        await self.go_on.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome.to_bytes()

    async def start_one(self) -> None:
        self.starts += 1


def jobs_of(body: dict[str, Any]) -> list[list[Constraint]]:
    return get_constraints(Endpoint.CHAT, body)


def gate_over(pool: ScriptedPool, entries: int = 8) -> GrammarGate:
    return GrammarGate(64 << 10, pool, entries, cpu_s=5.0, rules=RULES)


async def test_verdicts_are_remembered_and_forgotten_in_turn() -> None:
    pool = ScriptedPool()
    gate = gate_over(pool, entries=4)
    body = {"structured_outputs": {"regex": "a"}}
    for _ in range(3):
        await gate.check(jobs_of(body))
    assert len(pool.jobs) == 1
    # An exact verdict holds for the best effort, not vice versa.
    exact, best = (
        Constraint(ConstraintKind.JSON, TEXT, "", exact=exact) for exact in (True, False)
    )
    assert [await gate.verdict([exact]), await gate.verdict([best])][1][1]
    assert len(pool.jobs) == 2
    for name in "bcde":
        await gate.check(jobs_of({"structured_outputs": {"regex": name}}))
    await gate.check(jobs_of(body))
    assert pool.jobs[-1][0][1] == "a"
    assert gate.take_counts().results == {"ok": 7, "known": 3}
    assert not gate.take_counts().results


async def test_a_process_is_there_before_the_first_grammar() -> None:
    pool = ScriptedPool()
    await gate_over(pool).warm_up()
    assert (pool.starts, pool.jobs) == (1, [])


async def test_plain_json_needs_no_trial() -> None:
    pool = ScriptedPool()
    await gate_over(pool).check(jobs_of({"response_format": {"type": "json_object"}}))
    assert pool.jobs == []


async def test_equal_grammars_share_a_trial_that_outlives_its_first_request() -> None:
    pool = ScriptedPool()
    pool.go_on.clear()
    gate = gate_over(pool)
    body = {"structured_outputs": {"regex": "a"}}
    asking = [asyncio.create_task(gate.check(jobs_of(body))) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.sleep(0)
    pool.go_on.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [{job_key(jobs_of(body)[0], exact=False): None}] * 4
    assert len(pool.jobs) == 1
    assert gate.take_counts().results == {"ok": 1, "known": 4}


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        (chat_format(schema=SCHEMA), InvalidSchemaError, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a"}}, InvalidGrammarError, "structured_outputs.regex"),
        (
            {"tools": [tool("f"), tool("g")], "tool_choice": NAMED_G},
            InvalidSchemaError,
            "tools[1].function.parameters",
        ),
    ],
)
async def test_a_refusal_names_the_field(
    body: dict[str, Any], error: type[RequestError], param: str
) -> None:
    pool = ScriptedPool()
    pool.outcome = TrialVerdict("no")
    gate = gate_over(pool)
    for _ in range(2):
        with pytest.raises(error) as caught:
            await gate.check(jobs_of(body))
        assert caught.value.param == param
        assert caught.value.status == 400
    assert len(pool.jobs) == 1
    assert gate.take_counts().results == {"refused": 2}


@pytest.mark.parametrize(
    ("outcome", "error", "result"),
    [
        (JobTimeoutError(), NotTriedError, "timeout"),
        (JobSpentError(), InvalidGrammarError, "spent"),
        (JobCrashedError(), InvalidGrammarError, "crashed"),
        (PoolFullError(), OverloadedError, "overloaded"),
    ],
)
async def test_what_goes_wrong_in_a_trial(
    outcome: Exception, error: type[Exception], result: str
) -> None:
    pool = ScriptedPool()
    pool.outcome = outcome
    gate = gate_over(pool)
    with pytest.raises(error):
        await gate.check(jobs_of({"structured_outputs": {"regex": "a"}}))
    assert gate.take_counts().results == {result: 1}


@pytest.mark.parametrize(
    "outcome", [JobSpentError(), JobCrashedError(), TrialVerdict("slow", measured=True)]
)
async def test_what_was_measured_is_tried_again_later(
    outcome: TrialVerdict | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ScriptedPool()
    pool.outcome = outcome
    gate = gate_over(pool)
    body = {"structured_outputs": {"regex": "a"}}
    for _ in range(2):
        with pytest.raises(InvalidGrammarError):
            await gate.check(jobs_of(body))
    assert len(pool.jobs) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    pool.outcome = TrialVerdict()
    await gate.check(jobs_of(body))
    assert len(pool.jobs) == 2


async def test_each_tool_has_the_time_of_one() -> None:
    pool = ScriptedPool()
    gate = gate_over(pool, entries=64)
    tools = [tool(f"f{i}") for i in range(24)]
    for i, one in enumerate(tools):
        one["function"]["parameters"] = {**SCHEMA, "title": str(i)}
    await gate.check(jobs_of({"tools": tools, "tool_choice": "required"}))
    assert [len(parts) for parts in pool.jobs] == [1] * 24
    assert pool.shares == [1] * 24
    # A grammar of all of them has the time of all.
    await gate.check_job(
        [Constraint(ConstraintKind.STRUCTURAL_TAG, "{}", "tools", derived=True, shares=24)]
    )
    assert pool.shares[-1] == 24
    pool.outcome = JobSpentError()
    with pytest.raises(InvalidGrammarError, match="more than 120 s of processor time"):
        await gate.check_job([Constraint(ConstraintKind.STRUCTURAL_TAG, "[]", "tools", shares=24)])


async def test_what_is_too_large_goes_nowhere() -> None:
    pool = ScriptedPool()
    with pytest.raises(InvalidGrammarError, match="more than 65536 bytes"):
        body = {"structured_outputs": {"grammar": "é" * 40000}}
        await gate_over(pool).check(jobs_of(body))
    assert pool.jobs == []


VALIDATE = "/v1/structured_outputs/validate"


async def test_the_route_answers_with_the_verdict(tmp_path: Path) -> None:
    pool = ScriptedPool()
    frontend = ScriptedFrontend(grammars=gate_over(pool))
    launcher = ScriptedLauncher(engine=ScriptedEngine(frontend))
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        first = (await service.client.post(VALIDATE, json={"json": SCHEMA})).json()
        assert first == {
            "valid": True,
            "reason": None,
            "code": None,
            "param": "json",
            "backend": "xgrammar",
            "compile_ms": 500.0,
            "cached": False,
        }
        again = (await service.client.post(VALIDATE, json=chat_format(schema=SCHEMA))).json()
        assert again["cached"]
        assert again["param"] == "response_format.json_schema.schema"
        pool.outcome = TrialVerdict("it is odd")
        bad = (await service.client.post(VALIDATE, json={"regex": "a"})).json()
        assert (bad["valid"], bad["code"]) == (False, "invalid_grammar")
        assert "it is odd" in bad["reason"]
        for body in ({}, {"json": {}, "regex": "a"}, {"jsn": {}}, {"choice": "a"}):
            refused = await service.client.post(VALIDATE, json=body)
            assert refused.status_code == 400, body
        assert await service.metric('rbln_grammar_checks_total{result="known"}') == 1
        assert await service.metric("rbln_grammar_compile_seconds_count") == 1


# --------------------------------------------------------------------------------------------- work
PATTERN = "^[a-z ]*[a-m].{3,40}[a-z]$"
TEXT_FORMAT = '"the quick brown fox jumps over the lazy dog and then away"'


@pytest.fixture
def grammar(monkeypatch: pytest.MonkeyPatch) -> LarkGrammar:
    """Compile the pattern as the engine does, with a twentieth of the work for a mask."""
    limits = llguidance.LLParserLimits(step_lexer_fuel=10_000, verbose_errors=False)
    monkeypatch.setattr(lark, "_ENGINE_LIMITS", limits)
    compiler, tokenizer, _ = vocabulary()
    text = grammar_of({"type": "string", "pattern": PATTERN})
    return compiler.compile(text, {int(tokenizer.eos_token_id)}, in_trial=False)


def allowed(grammar: LarkGrammar) -> list[int]:
    """Return the tokens of the grammar's mask."""
    mask = torch.zeros((1, (len(vocabulary()[2]) + 31) // 32), dtype=torch.int32)
    grammar.fill_bitmask(mask, 0)
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def follow(grammar: LarkGrammar, text: str) -> list[int]:
    """Write a text with the longest tokens that each mask allows."""
    texts = vocabulary()[2]
    taken: list[int] = []
    while text:
        fits = [
            token for token in allowed(grammar) if texts[token] and text.startswith(texts[token])
        ]
        assert fits, (text, grammar.problem())
        taken.append(max(fits, key=lambda token: len(texts[token])))
        assert grammar.accept_tokens("request", taken[-1:])
        text = text.removeprefix(texts[taken[-1]])
    return taken


def test_an_answer_goes_on_byte_by_byte(grammar: LarkGrammar) -> None:
    _, tokenizer, texts = vocabulary()
    stop = int(tokenizer.eos_token_id)
    taken = follow(grammar, TEXT_FORMAT[:-4])
    assert grammar.by_bytes
    assert all(len(texts[token]) == 1 for token in taken[-20:])
    assert any(len(texts[token]) > 1 for token in taken)
    assert stop not in allowed(grammar)
    # Drafts are judged and tokens taken back as before.
    ends = [texts.index(character) for character in TEXT_FORMAT[-4:]]
    assert grammar.validate_tokens([*ends, stop]) == [*ends, stop]
    assert grammar.validate_tokens([texts.index("w"), texts.index("\n"), *ends]) == [ends[0]]
    assert grammar.accept_tokens("request", [*ends, stop]) and grammar.is_terminated()
    grammar.rollback(3)
    assert not grammar.is_terminated()
    assert grammar.accept_tokens("request", [*ends[-2:], stop]) and grammar.is_terminated()
    grammar.reset()
    assert len(follow(grammar, TEXT_FORMAT[:4])) < 4


def test_a_token_outside_is_no_work(grammar: LarkGrammar) -> None:
    assert not grammar.accept_tokens("request", [vocabulary()[2].index("x")])
    assert not grammar.by_bytes
