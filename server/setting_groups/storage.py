"""Settings of stored files, batches and responses."""

from __future__ import annotations

from pydantic import BaseModel, Field

from server.setting_groups.values import OptionalPath


class StorageSettings(BaseModel):
    """Storage of files, batches and responses."""

    data_dir: OptionalPath = Field(
        None,
        description="Directory for files, batches and responses, used by one server only. Unset: "
        "/v1/files, /v1/batches and /v1/messages/batches return 501, and responses are not stored.",
    )
    adopt_unnamed_key_data: bool = Field(
        False,
        description="At start, assign data that earlier versions stored for unnamed keys by "
        "position (api-1, admin-2) to the keys at these positions. Use it only if their order has "
        "not changed.",
    )
    max_file_bytes: int = Field(
        200 * 1024 * 1024, ge=1024, description="Maximum size of an uploaded file in bytes."
    )
    upload_timeout_s: float = Field(
        600.0, gt=0, description="Timeout in seconds for uploading a file."
    )
    max_stored_bytes: int = Field(
        20 * 1024 * 1024 * 1024,
        ge=1024,
        description="Maximum size of all files and stored responses together in bytes.",
    )
    max_files_per_key: int = Field(
        1000, ge=1, description="Maximum number of files per API key; without keys, of all clients."
    )
    max_batch_lines: int = Field(50_000, ge=1, description="Maximum number of lines in one batch.")
    max_batches_per_key: int = Field(
        100, ge=1, description="Maximum number of unfinished batches per API key."
    )
    file_retention_s: int = Field(
        30 * 24 * 3600,
        ge=0,
        description="Seconds after which files and finished batches are deleted, unless the "
        "client set another time. 0: never.",
    )
    max_responses_per_key: int = Field(
        10_000, ge=1, description="Maximum number of stored responses per API key."
    )
    max_conversation_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        description="Maximum size of a stored conversation that a request continues, in bytes; "
        "above: 400.",
    )
    max_continued_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="Maximum size of the stored conversations of all running requests together, in "
        "bytes; above: 429. Conversations of up to 64 KiB do not count.",
    )
    max_background_per_key: int = Field(
        100,
        ge=1,
        description="Maximum number of waiting and running background responses per API key; more "
        "get 429.",
    )
    max_background: int = Field(
        1000,
        ge=1,
        description="Maximum number of waiting and running background responses of all keys.",
    )
    response_retention_s: int = Field(
        30 * 24 * 3600,
        ge=0,
        description="Seconds after which a response is deleted unless another one continues it. 0: "
        "never.",
    )
    min_free_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=0,
        description="Bytes kept free on the disk of --data-dir; below it, uploads get 507 and "
        "batches wait.",
    )
