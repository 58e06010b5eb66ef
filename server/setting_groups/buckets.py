"""Settings of compiled sizes that change while the server answers."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BucketSettings(BaseModel):
    """Changes of the compiled sizes."""

    auto_buckets: bool = Field(
        False,
        description="Apply the tuner's buckets for the recent steps while serving, at most once an "
        "hour, and change back if steps take longer.",
    )
    auto_buckets_window_s: float = Field(
        600.0, gt=0, description="Seconds whose steps `--auto-buckets` looks at, and measures with."
    )
    auto_buckets_min_saving: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Predicted share of step time that a change by `--auto-buckets` must save.",
    )
    bucket_grace_s: float = Field(
        30.0,
        ge=0,
        description="Seconds for which graphs of earlier buckets stay loaded after a change.",
    )
