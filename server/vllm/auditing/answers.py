"""Records of the engine's answers for the audit log.

An answer is a sequence of the engine: `n` answers are n records. A record has what the engine got:
the prompt's token ids and the sampling parameters after vLLM's and this server's changes, such as a
schema's grammar and the seed of the sequence. It has no API key, only its name.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from vllm.sampling_params import SamplingParams

from rbln_backend.api.models import weights_digest
from rbln_backend.api.requests import (
    ACCOUNT_ARGS,
    EXTRA_ARGS,
    OBJECTIVE_ARGS,
    PROGRESS_ARGS,
    SHARE_ARGS,
)
from rbln_backend.errors import ConfigError
from server.audit.writer import AuditCounts, AuditWriter, timestamp
from server.errors import ServerError
from server.request.record import RequestRecord, record_var

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

Content = Literal["request", "tokens", "digest"]

_SEED_BITS = 62
# Of this server's extra arguments none changes an answer; an objective could refuse its replay.
_OURS = (
    *(ACCOUNT_ARGS, EXTRA_ARGS, OBJECTIVE_ARGS, PROGRESS_ARGS, SHARE_ARGS),
    # An answer is computed again from its prompt.
    "kv_transfer_params",
)


class _Audited(NamedTuple):
    """A running sequence, and the request that it answers."""

    state: RequestState
    request: EngineCoreRequest
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of an answer's request, as they are when the answer ends."""

    request_id: str
    route: str
    key: str | None
    tier: str | None
    body: bytes | None


class AuditLog:
    """Collects the answers of client requests and passes their records to the writer."""

    def __init__(
        self,
        writer: AuditWriter,
        content: Content,
        settle: Callable[[], None],
        identity: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`content` is that of `--audit-content`.

        `settle` waits until the identity of the engine is known, and raises `LaunchError`;
        `identity` then returns the fields of a header.
        """
        self._writer, self._content = writer, content
        self.settle, self.identity = settle, identity
        self._elsewhere: Callable[[], tuple[int, bool]] | None = None
        self._running: dict[str, _Audited] = {}
        self._adapters: dict[tuple[int, str], str | None] = {}

    def add_processes(self, elsewhere: Callable[[], tuple[int, bool]]) -> None:
        """Include the logs of other HTTP processes in `counts`.

        `elsewhere` returns the records that wait there, and whether one of the logs fails.
        """
        self._elsewhere = elsewhere

    def admit(self, params: Any, record: RequestRecord | None) -> None:
        """Give an answer that is sampled without a seed one, so that it can be replayed.

        Raises `AuditUnavailableError` while no request may begin.
        """
        if record is None or not isinstance(params, SamplingParams):
            return
        try:
            self._writer.require_space()
        except ServerError as error:
            record.failure = error
            raise
        if params.seed is None and params.temperature > 0:
            params.seed = secrets.randbits(_SEED_BITS)

    def begin(self, request: EngineCoreRequest, state: RequestState) -> None:
        """Follow a sequence that the engine begins; those of no client's request are left out."""
        record = record_var.get()
        if record is not None and request.sampling_params is not None:
            self._running[request.request_id] = _Audited(state, request, record)

    def end(self, request_ids: Iterable[str], reason: str) -> None:
        """Record sequences that have ended; those without a token have no answer."""
        for request_id in request_ids:
            audited = self._running.pop(request_id, None)
            if audited is None:
                continue
            detokenizer = audited.state.detokenizer
            if detokenizer is not None and detokenizer.num_output_tokens():
                identity = _identity(audited.record)
                make = partial(self._record, audited, identity, reason, time.time())
                self._writer.put(make)

    def end_all(self, reason: str) -> None:
        """Record every running sequence."""
        self.end([*self._running], reason)

    def put(self, record: Mapping[str, Any]) -> None:
        """Record something else than an answer."""
        self._writer.put(lambda: record)

    def counts(self) -> AuditCounts:
        """Return the state of the log; waiting and failing are those of all processes."""
        counts = self._writer.counts()
        if self._elsewhere is None:
            return counts
        waiting, is_failing = self._elsewhere()
        return replace(
            counts,
            waiting=counts.waiting + waiting,
            is_failing=counts.is_failing or is_failing,
        )

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds."""
        self._writer.close(timeout_s)

    def _record(
        self, audited: _Audited, identity: Identity, reason: str, ended: float
    ) -> Mapping[str, Any]:
        """Return the record of an answer; runs in the writer's thread."""
        state, request = audited.state, audited.request
        assert state.detokenizer is not None
        assert request.sampling_params is not None
        content: dict[str, Any] = {
            "prompt": list(request.prompt_token_ids or ()),
            "output": list(state.detokenizer.output_token_ids),
            "params": plain_params(request.sampling_params),
        }
        if request.mm_features or request.prompt_embeds is not None:
            content["other_inputs"] = True
        return {
            "kind": "answer",
            "time": timestamp(ended),
            "begun": timestamp(request.arrival_time),
            "request_id": identity.request_id,
            "answer_id": state.external_req_id,
            "index": state.request_index,
            "route": identity.route,
            "key": identity.key,
            "tier": identity.tier,
            "adapter": self._adapter(request.lora_request),
            "finish_reason": reason,
            "body": _body(identity.body, self._content),
            **(_digests(content) if self._content == "digest" else content),
        }

    def _adapter(self, adapter: LoRARequest | None) -> dict[str, Any] | None:
        if adapter is None:
            return None
        known = (adapter.lora_int_id, adapter.lora_path)
        if known not in self._adapters:
            self._adapters[known] = digest_or_none(adapter.lora_path)
        return {
            "name": adapter.lora_name,
            "path": adapter.lora_path,
            "digest": self._adapters[known],
        }


def digest_or_none(path: str) -> str | None:
    """Return the digest of an adapter's weights, None if its folder is gone."""
    try:
        return weights_digest(path, "", 0)
    except (ConfigError, OSError):
        return None


def _identity(record: RequestRecord) -> Identity:
    return Identity(
        record.request_id,
        record.route.template,
        record.caller.key,
        None if record.tier is None else record.tier.value,
        record.audited_body,
    )


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Return parameters as JSON values, without those that change no answer."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(params))
    extra = {k: v for k, v in (plain.pop("extra_args", None) or {}).items() if k not in _OURS}
    return {**plain, **({"extra_args": extra} if extra else {})}


def _body(body: bytes | None, content: Content) -> dict[str, Any] | None:
    if body is None:
        return None
    about: dict[str, Any] = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    if content == "request":
        about["text"] = body.decode(errors="replace")
    return about


def _digests(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SHA-256 of each part as JSON without spaces, and the length of lists."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        digest = hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
        found[name] = (
            {"sha256": digest, "length": len(value)} if isinstance(value, list) else digest
        )
    return found
