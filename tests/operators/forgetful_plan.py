"""An engine whose warm-up leaves a graph out: what the product never does, for the alert on it.

vLLM calls `forget` in every process that has `plugin_folder` on its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FORGOTTEN = "decode-4"
_PLUGIN = "[vllm.general_plugins]\ntest_forgetful = tests.operators.forgetful_plan:forget\n"


def forget() -> None:
    """Leave the graph out of every plan that this process makes from now on."""
    from rbln_backend.worker import engine_build

    whole = engine_build.plan

    def shorter(*args: Any, **options: Any) -> Any:
        return [spec for spec in whole(*args, **options) if str(spec) != FORGOTTEN]

    setattr(engine_build, "plan", shorter)  # noqa: B010 (a module's name is not assigned to)


def plugin_folder(folder: Path) -> Path:
    """Make `folder` one that a process has on its path to be forgetful."""
    dist = folder / "test_forgetful-0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: test-forgetful\nVersion: 0\n")
    (dist / "entry_points.txt").write_text(_PLUGIN)
    return folder
