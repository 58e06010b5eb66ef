"""Our engine with the tensors of torch-rbln's device, under which the vendor's own runs by default.

Of the vendor's wheels torch-rbln alone is on the path; see README.md here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import Job, run
from tests.vendor.call_form import call_form, kept_call_forms
from tests.vendor.differences import allowed_in, shown_in, unexplained, unused
from tests.vendor.environment import torch_rbln_variables
from tests.vendor.runs import NUM_TOKENS, OPTIONS, RUNS, make_rounds

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", ["llama device", "window device"])
def test_device_tensors_answer_as_transformers_and_are_called_as_theirs(
    name: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    job = Job(RUNS[name].checkpoint(checkpoints), dict(OPTIONS), make_rounds(), NUM_TOKENS)
    ran = run([job], tmp_path, environment=torch_rbln_variables())
    assert ran.answers == [job.expected()]
    forms = (call_form(ran.log), kept_call_forms()[name])
    assert unexplained(*forms, allowed_in(name)) == []
    assert unused(*forms, shown_in(name)) == []
