"""`rbln-serve chat` over a scripted server on a real socket."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from server.commands.cli import main
from tests.server.commands.chat_server import ChatServer


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer().running() as running:
        yield running


def _type(lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))


def test_one_question(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--temperature", "0", "--max-tokens", "5", "--stats", "--system-prompt", "Be brief."]
    assert main(["chat", "--url", f"{server.url}/v1", "-q", "Hello", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out == "heard 2\n"
    assert "first token after" in shown.err
    assert "2 tokens" in shown.err
    assert server.bodies == [
        {
            "model": "first",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "max_tokens": 5,
        }
    ]


def test_a_conversation_keeps_its_messages_until_it_is_reset(
    server: ChatServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _type("one\n\ntwo \\\nlines\n/reset\nthree\n/system Be kind.\nfour\n/exit\nfive\n", monkeypatch)
    assert main(["chat", "--url", server.url, "--model-name", "second"]) == 0
    assert capsys.readouterr().out == "heard 1\nheard 3\nheard 1\nheard 2\n"
    assert {body["model"] for body in server.bodies} == {"second"}
    assert [m["content"] for m in server.bodies[1]["messages"]] == [
        "one",
        "heard 1",
        "two \nlines",
    ]
    assert server.bodies[3]["messages"][0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize("by_flag", [True, False])
def test_the_key_is_sent(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, by_flag: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other" if by_flag else "secret")
    flags = ["--api-key", "secret"] if by_flag else []
    assert main(["chat", "--url", server.url, "-q", "Hello", *flags]) == 0
    assert server.keys == ["Bearer secret"]


def test_errors_are_shown_and_end_with_1(
    server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 429
    assert main(["chat", "--url", server.url, "-q", "Hello"]) == 1
    assert "429: no room" in capsys.readouterr().err
    server.status, server.failing = 200, True
    assert main(["chat", "--url", server.url, "-q", "Hello"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "heard 1\n"
    assert "the engine failed" in shown.err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "-q", "Hello"]) == 1
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err


def test_control_characters_and_reasoning_stay_out_of_the_output(
    server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.deltas = ({"reasoning": "hm"}, {"content": "a\x1b[31mb\u009bc\r\td\n"})
    assert main(["chat", "--url", server.url, "-q", "Hello"]) == 0
    assert capsys.readouterr().out == "a[31mbc\td\n\n"
