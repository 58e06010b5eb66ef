"""An engine whose warm-up leaves a graph out: what the product never does, for the alert on it.

vLLM calls `forget` in every process that has `plugin_folder` on its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rbln_backend.worker.graph_factory import GraphFactory, GraphRequest
    from rbln_backend.worker.warmup import WarmUp

FORGOTTEN = "decode-4"
_PLUGIN = "[vllm.general_plugins]\ntest_forgetful = tests.operators.forgetful_plan:forget\n"


def forget() -> None:
    """Leave the graph out of every warm-up that this process makes from now on."""
    from rbln_backend.worker.warmup import WarmUp

    whole = WarmUp.compile_all

    def shorter(self: WarmUp, requests: Sequence[GraphRequest], factory: GraphFactory) -> Any:
        kept = [request for request in requests if str(request.spec) != FORGOTTEN]
        return whole(self, kept, factory)

    setattr(WarmUp, "compile_all", shorter)  # noqa: B010 (a method is not assigned to)


def plugin_folder(folder: Path) -> Path:
    """Make `folder` one that a process has on its path to be forgetful."""
    dist = folder / "test_forgetful-0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: test-forgetful\nVersion: 0\n")
    (dist / "entry_points.txt").write_text(_PLUGIN)
    return folder
