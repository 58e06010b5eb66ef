"""Rules of single requests that server and engine share: priorities, drafts, steps."""

from __future__ import annotations

from rbln_backend.config import (
    BACKGROUND_PRIORITY,
    FIRST_PRIORITY,
    NO_TOKEN_LEFT,
    PROGRESS_ARGS,
    PROMPT_PROGRESS,
    QUEUE_TIMEOUT,
)
from rbln_backend.lora.adapter_files import (
    Target,
    TensorName,
    check_config,
    check_modules,
    check_tensors,
)
from rbln_backend.speculation.drafter import EXTRA_ARGS, Prediction
