"""What the RBLN SDK takes from the environment of a rank that works with others."""

from __future__ import annotations

import os

_STANDALONE = "RBLN_CTX_STANDALONE"
_ASYNCHRONOUS = "RBLN_FORCE_CCL_ASYNC"


def set_sdk_environment() -> str | None:
    """Set what the documents say their platform sets under model parallelism.

    Call it before the SDK makes a context. Returns a warning where the user has chosen otherwise.
    """
    environment = os.environ  # noqa: TID251 (the SDK's settings, not ours)
    environment[_STANDALONE] = "1"
    if environment.setdefault(_ASYNCHRONOUS, "1") != "0":
        return None
    return f"{_ASYNCHRONOUS}=0 makes collectives wait for the host; unset it unless you debug them"
