"""Hostile chat requests from a seed: wrong and costly constraints in every field."""

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.real_server import RealServer

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1e308,
    "",
    "x" * 300,
    "\ud83d",
    "\x00",
    [],
    {},
    [[]],
    [None],
    {"a": None},
    {"type": "object"},
    {"$ref": "#"},
    {"enum": []},
    "((",
    "root ::= root",
    [1],
    {"": {"": {}}},
)


def hostile_body(pick: random.Random) -> dict[str, Any]:
    """Return a chat request that is wrong, costly or, rarely, valid."""

    def nest(depth: int) -> Any:
        key = pick.choice(("items", "properties", "anyOf", "$ref", "pattern", "enum", "x", "allOf"))
        value = nest(depth - 1) if depth else pick.choice(HOSTILE_VALUES)
        return pick.choice(({key: value}, {"type": pick.choice(("array", "object")), key: value},
                            [value], {key: [value, value] if depth < 8 else value}))  # fmt: skip

    def letters(of: str) -> str:
        return "".join(pick.choices(of, k=40))

    costly = (
        lambda: {"type": "string", "pattern": "(" * pick.randint(1, 300) + "a" + ")+" * 300},
        lambda: {"enum": ["v" * pick.randint(1, 40) for _ in range(pick.randint(1, 2000))]},
        lambda: {"type": "array", "minItems": pick.choice((0, 10**6, 2**31, 2**70))},
        lambda: {"type": "string", "maxLength": pick.choice((-1, 10**9, 2**40))},
        lambda: {"type": "integer", "minimum": -(10**40), "maximum": 10**40},
        lambda: nest(pick.randint(0, 70)),
    )
    schema = pick.choice(costly)()
    fields: tuple[dict[str, Any], ...] = (
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {pick.choice(("json", "regex", "choice", "grammar",
                                             "structural_tag", "json_object", "nope")):
                                pick.choice(HOSTILE_VALUES)}},
        {"structured_outputs": {"regex": letters("()[]{}*+?|\\^$ab.1,")}},
        {"structured_outputs": {"grammar": "root ::= " + letters('ab"|()*+?[]:= \n')}},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "structural_tag", "format": schema}},
        {"response_format": pick.choice(HOSTILE_VALUES)},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
         "tool_choice": pick.choice(("required", "auto", {"type": "function"}, None))},
        {"structured_outputs": {"regex": pick.choice(HOSTILE_VALUES)}},
        {pick.choice(("temperature", "messages", "stop", "n", "logit_bias", "stream")):
         pick.choice(HOSTILE_VALUES)},
    )  # fmt: skip
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 2} | pick.choice(fields)


# ---------------------------------------------------------------------------------------- lag probe
_PROBE = """
import http.client, sys, time
host = sys.argv[1]
while True:
    connection = http.client.HTTPConnection(host, timeout=60)
    started = time.perf_counter()
    connection.request("GET", "/livez")
    connection.getresponse().read()
    print(time.perf_counter() - started, flush=True)
    connection.close()
    time.sleep(0.01)
"""


@contextmanager
def lag_of(server: RealServer, tmp_path: Path) -> Iterator[list[float]]:
    """Yield a list that has the seconds of each request when the block ends.

    The probe is another process, because this one is busy.
    """
    seconds: list[float] = []
    output = tmp_path / "probe"
    host = server.url.removeprefix("http://")
    with output.open("wb") as file:
        probe = subprocess.Popen([sys.executable, "-c", _PROBE, host], stdout=file)
    try:
        yield seconds
    finally:
        probe.kill()
        probe.wait(10)
        seconds += [float(line) for line in output.read_text().splitlines()]


def lag_summary(seconds: list[float]) -> str:
    """Return a line for a wide run's output; machines differ too much to assert it."""
    ranked = sorted(seconds)
    return f"lag ms: median {ranked[len(ranked) // 2] * 1000:.1f}, max {ranked[-1] * 1000:.0f}"
