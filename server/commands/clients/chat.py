"""`rbln-serve chat`: a conversation with a running server, in the terminal.

Flags have the names of `vllm chat`. Exit codes: 0 end of input, 1 the server failed, 2 invalid
command line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

import httpx

from server.commands.clients.chat_session import ChatError, ChatSession, Piece, first_model
from server.commands.command_line.command_parser import CommandParser
from server.settings import client_key

_PROG = "rbln-serve chat"
_INTERRUPTED = 130
_HELP = """\
/reset          forget the conversation
/system TEXT    set the system prompt and forget the conversation
/help           show this
/exit           end; so does Ctrl-D. Ctrl-C stops an answer.
A line that ends with \\ continues on the next one.
"""
# Control characters other than tab and line feed could move the cursor or change the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def chat(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    args = chat_parser().parse_all(argv)
    key = args.api_key or client_key()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    base_url = args.url.rstrip("/").removesuffix("/v1")
    options = {
        name: value
        for name in ("temperature", "top_p", "max_tokens", "seed")
        if (value := getattr(args, name)) is not None
    }
    timeout = httpx.Timeout(10, read=args.timeout)
    with httpx.Client(base_url=base_url, headers=headers, timeout=timeout) as client:
        try:
            model = args.model_name or first_model(client)
            session = ChatSession(client, model, options, args.system_prompt)
            terminal = _Terminal(session, stats=args.stats)
            if args.quick is not None:
                terminal.print_answer(args.quick)
            else:
                terminal.converse()
        except ChatError as error:
            sys.stderr.write(f"{_PROG}: error: {error}\n")
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            return _INTERRUPTED
    return 0


def chat_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(prog=_PROG, description="Talk to a running OpenAI-compatible server.")
    add = parser.add_argument_group("server").add_argument
    local = "http://127.0.0.1:8000"
    add("--url", default=local, metavar="URL", help=f"address of the server (default: {local})")
    add("--api-key", metavar="KEY", help="API key (default: $OPENAI_API_KEY)")
    add("--model-name", metavar="NAME", help="served model or adapter (default: the first one)")
    about = "seconds to wait for the next token (default: 600)"
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help=about)
    add = parser.add_argument_group("messages").add_argument
    add("--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    add("-q", "--quick", metavar="TEXT", help="print the answer to TEXT and end")
    add("--stats", action="store_true", help="print times and tokens after each answer")
    add = parser.add_argument_group("sampling (default: the server's)").add_argument
    add("--temperature", type=float, metavar="T", help="0 is greedy")
    add("--top-p", type=float, metavar="P", help="probability mass that is sampled from")
    add("--max-tokens", type=_positive, metavar="N", help="maximum tokens of an answer")
    add("--seed", type=int, metavar="N", help="seed of the sampler")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


class _Terminal:
    """Reads messages from standard input and prints answers as they come."""

    def __init__(self, session: ChatSession, *, stats: bool) -> None:
        self._session, self._stats = session, stats
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def converse(self) -> None:
        """Answer messages until the end of input."""
        if self._is_terminal:
            with suppress(ImportError):
                # Line editing and history for `input`.
                import readline  # noqa: F401
            sys.stdout.write(f"{self._session.model}; /help lists the commands\n")
        while (text := self._read()) is not None:
            if text.startswith("/"):
                if not self._command(text):
                    return
            elif text:
                self._answer(text)

    def print_answer(self, text: str) -> None:
        """Print the answer to one message. Raises `ChatError`."""
        dimmed = False
        try:
            for piece in self._session.ask(text):
                dimmed = self._print(piece, dimmed=dimmed)
        finally:
            sys.stdout.write(f"{_PLAIN if dimmed else ''}\n")
            sys.stdout.flush()
        if self._stats and self._session.times is not None:
            sys.stderr.write(f"[{self._session.times.summary()}]\n")

    def _answer(self, text: str) -> None:
        """Print the answer; an error or Ctrl-C ends only this answer."""
        try:
            self.print_answer(text)
        except ChatError as error:
            if not self._is_terminal:
                raise
            sys.stderr.write(f"error: {error}\n")
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            sys.stderr.write("stopped\n")

    def _print(self, piece: Piece, *, dimmed: bool) -> bool:
        """Write a piece, reasoning dimmed and on terminals only; return whether text is dimmed."""
        text = _CONTROL.sub("", piece.text)
        is_reasoning = piece.kind == "reasoning"
        if is_reasoning and not self._is_terminal:
            return False
        if is_reasoning != dimmed:
            sys.stdout.write(_DIM if is_reasoning else f"{_PLAIN}\n")
        sys.stdout.write(text)
        sys.stdout.flush()
        return is_reasoning

    def _read(self) -> str | None:
        """Return the next message, or None at the end of input."""
        lines: list[str] = []
        prompt = "> " if self._is_terminal else ""
        while True:
            try:
                line = input(prompt)
            except EOFError:
                return "\n".join(lines) or None
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                sys.stdout.write("\n")
                return ""
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).strip()
            lines.append(line.removesuffix("\\"))

    def _command(self, text: str) -> bool:
        """Run a command of the conversation; return False for the end."""
        name, _, value = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._session.reset()
        elif name == "/system":
            self._session.system = value.strip() or None
            self._session.reset()
        else:
            sys.stderr.write(_HELP)
        return True
