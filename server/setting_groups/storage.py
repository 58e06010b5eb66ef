"""Settings of stored files, batches and responses."""

from __future__ import annotations

from pydantic import BaseModel, Field

from server.setting_groups.values import OptionalPath


class StorageSettings(BaseModel):
    """Storage of files, batches and responses."""

    data_dir: OptionalPath = Field(
        None,
        description="Directory for files, batches and responses, used by one server only. Unset: "
        "/v1/files and /v1/batches return 501, and responses are not stored.",
    )
    max_file_bytes: int = Field(
        200 * 1024 * 1024, ge=1024, description="Maximum size of an uploaded file in bytes."
    )
    max_stored_bytes: int = Field(
        20 * 1024 * 1024 * 1024,
        ge=1024,
        description="Maximum size of all files and stored responses together in bytes.",
    )
    max_batch_lines: int = Field(50_000, ge=1, description="Maximum number of lines in one batch.")
    file_retention_s: int = Field(
        30 * 24 * 3600,
        ge=0,
        description="Seconds after which files and finished batches are deleted, unless the "
        "client set another time. 0: never.",
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
