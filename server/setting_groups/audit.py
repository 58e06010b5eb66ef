"""Settings of the audit log."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from server.setting_groups.values import OptionalPath


class AuditSettings(BaseModel):
    """Log of answers for `rbln-serve replay`."""

    audit_log: OptionalPath = Field(
        None,
        description="Directory of the audit log, used by one server only: a hash-chained record of "
        "each answer, which `rbln-serve replay` runs again. Unset: no log.",
    )
    audit_content: Literal["request", "tokens", "digest"] = Field(
        "tokens",
        description="Contents of audit records: `request`: token ids, parameters and the request's "
        "body; `tokens`: the body as a digest only; `digest`: digests only, which cannot be "
        "replayed.",
    )
    audit_on_full: Literal["stop", "continue"] = Field(
        "stop",
        description="While audit records cannot be written, or too many wait: `stop` answers new "
        "requests with 503, `continue` drops records and counts them.",
    )
    audit_queue_records: int = Field(
        4096, ge=1, description="Maximum number of audit records that wait to be written."
    )
    audit_file_bytes: int = Field(
        64 * 1024 * 1024,
        ge=64 * 1024,
        description="Size in bytes at which the audit log begins another file.",
    )
    audit_max_bytes: int = Field(
        8 * 1024 * 1024 * 1024,
        ge=128 * 1024,
        description="Maximum size of the audit log in bytes; the oldest files are deleted. At "
        "least twice --audit-file-bytes.",
    )
    audit_retention_s: int = Field(
        0,
        ge=0,
        description="Seconds after its last record for which a file of the audit log is kept. 0: "
        "until --audit-max-bytes.",
    )
    shadow_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of greedy and seeded answers that are computed again in spare rows and "
        "compared token by token, from 0 to 1. 0: none.",
    )
