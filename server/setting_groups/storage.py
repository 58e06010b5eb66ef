"""Settings of what clients store."""

from __future__ import annotations

from pydantic import BaseModel, Field

from server.setting_groups.values import OptionalPath


class StorageSettings(BaseModel):
    """What clients leave here: files, batches, responses."""

    data_dir: OptionalPath = Field(
        None,
        description="Directory for files, batches and responses, this server's alone. Unset: "
        "/v1/files, /v1/batches and /v1/messages/batches answer 501, and no response is kept.",
    )
    adopt_unnamed_key_data: bool = Field(
        False,
        description="At start, give the data that earlier versions stored for unnamed keys by "
        "position (api-1, admin-2) to the keys that have these positions now. Use it only if their "
        "order has not changed.",
    )
    max_file_bytes: int = Field(
        200 * 1024 * 1024, ge=1024, description="Largest file that may be uploaded, in bytes."
    )
    upload_timeout_s: float = Field(
        600.0, gt=0, description="Seconds that a client may take to upload a file."
    )
    max_stored_bytes: int = Field(
        20 * 1024 * 1024 * 1024,
        ge=1024,
        description="Bytes that all files and stored responses may have together.",
    )
    max_files_per_key: int = Field(
        1000, ge=1, description="Most files of one API key; without keys, of all clients."
    )
    max_batch_lines: int = Field(50_000, ge=1, description="Most lines of one batch.")
    max_batches_per_key: int = Field(
        100, ge=1, description="Most batches of one API key that are not at their end."
    )
    file_retention_s: int = Field(
        30 * 24 * 3600,
        ge=0,
        description="Seconds after which files are deleted, and batches that ended forgotten, "
        "unless a client asked for another time. 0: never.",
    )
    max_responses_per_key: int = Field(
        10_000, ge=1, description="Most responses that are kept for one API key."
    )
    max_conversation_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        description="Bytes of the turns of a stored conversation that a request may continue; more "
        "get 400.",
    )
    max_continued_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="Bytes that the stored conversations of requests in progress may have "
        "together; more get 429. Those of up to 64 KiB do not count.",
    )
    max_background_per_key: int = Field(
        100,
        ge=1,
        description="Most responses of one API key that wait or run in the background; more get "
        "429.",
    )
    max_background: int = Field(
        1000, ge=1, description="Most responses of all keys that wait or run in the background."
    )
    response_retention_s: int = Field(
        30 * 24 * 3600,
        ge=0,
        description="Seconds after which a response is forgotten, and nobody has continued it. "
        "0: never.",
    )
    min_free_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=0,
        description="Bytes that stay free on the disk of --data-dir; uploads get 507, batches "
        "wait.",
    )
