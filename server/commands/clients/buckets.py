"""`rbln-serve buckets`: show or change the compiled sizes of a running server.

Exit codes: 0 shown or changed, 1 the server refused or the change failed, 2 invalid command line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from server.commands.command_line.command_parser import CommandParser
from server.settings import client_key

_PROG = "rbln-serve buckets"
_PATH = "/admin/buckets"
_AUTO = "auto"
_POLL_S = 0.5


class _BucketsError(Exception):
    """The server refused, or could not be reached."""


def buckets(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = buckets_parser()
    args = parser.parse_all(argv)
    wanted = {"decode": args.decode, "prefill": args.prefill}
    body = {phase: sizes for phase, sizes in wanted.items() if sizes is not None}
    if args.apply != bool(body):
        parser.error("--apply needs --decode or --prefill, and these need --apply")
    key = args.api_key or client_key()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=args.url.rstrip("/"), headers=headers, timeout=30) as client:
        try:
            if not args.apply:
                status = _call(client, "GET")
            else:
                status = _follow(client, _call(client, "POST", body))
        except _BucketsError as error:
            sys.stderr.write(f"{_PROG}: error: {error}\n")
            return 1
    sys.stdout.write(json.dumps(status, indent=2) + "\n" if args.json else _text(status))
    return int(args.apply and (status["last"] or {}).get("result") != "done")


def buckets_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog=_PROG, description="Show or change the compiled sizes of a running server."
    )
    add = parser.add_argument_group("server").add_argument
    local = "http://127.0.0.1:8000"
    add("--url", default=local, metavar="URL", help=f"address of the server (default: {local})")
    add("--api-key", metavar="KEY", help="admin key (default: $OPENAI_API_KEY)")
    add("--json", action="store_true", help="print the server's JSON object")
    add = parser.add_argument_group("sizes").add_argument
    add("--apply", action="store_true", help="change the sizes, and wait until they are in use")
    about = "requests of each decode graph, as 1,8,32, or auto: those of rbln-serve tune"
    add("--decode", type=_sizes, metavar="SIZES", help=about)
    about = "tokens of each prefill graph, as 32,256, or auto"
    add("--prefill", type=_sizes, metavar="SIZES", help=about)
    return parser


def _sizes(text: str) -> list[int] | str:
    if text == _AUTO:
        return text
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be sizes as 1,8,32 or auto, got {text!r}") from None


def _call(client: httpx.Client, method: str, body: object = None) -> dict[str, Any]:
    try:
        answer = client.request(method, _PATH, json=body)
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise _BucketsError(f"{client.base_url}: {str(error) or type(error).__name__}") from error
    if not answer.is_success:
        raise _BucketsError(found.get("error", {}).get("message", f"HTTP {answer.status_code}"))
    return dict(found)


def _follow(client: httpx.Client, status: dict[str, Any]) -> dict[str, Any]:
    """Return the status after the change; progress goes to standard error."""
    while (change := status["change"]) is not None:
        graphs, eta = change["graphs"], change["eta_s"]
        left = "" if eta is None else f", {eta:.0f} s left"
        sys.stderr.write(f"{change['phase']}: {graphs['done']} of {graphs['total']} graphs{left}\n")
        time.sleep(_POLL_S)
        status = _call(client, "GET")
    return status


def _text(status: Mapping[str, Any]) -> str:
    lines = [f"{phase}: {_joined(status[phase])}" for phase in ("decode", "prefill")]
    if status["refusal"] is not None:
        lines.append(f"cannot change while serving: {status['refusal']}")
    if (last := status["last"]) is not None:
        lines += _last_lines(last)
    return "".join(f"{line}\n" for line in lines)


def _last_lines(last: Mapping[str, Any]) -> list[str]:
    if last["result"] == "failed":
        return [f"last change failed: {last['error']}"]
    old = "; ".join(f"{phase} {_joined(last[f'old_{phase}'])}" for phase in ("decode", "prefill"))
    lines = [f"last change ({last['reason']}): {last['seconds']:.1f} s, before: {old}"]
    for phase, effect in (last["effect"] or {}).items():
        if effect is not None:
            share = f"{effect['saving']:+.1%} of step time saved"
            lines.append(f"measured {phase}: {share} in {effect['steps']} steps")
    return lines


def _joined(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
