"""Our calls of the SDK beside the vendor's: the same, but for named differences.

Theirs are the kept form (``call_form.json``); ours are the log of a run over the double.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import Job, run
from tests.vendor.call_form import call_form, kept_call_forms
from tests.vendor.differences import allowed_in, shown_in, unexplained, unused
from tests.vendor.environment import torch_rbln_variables
from tests.vendor.runs import NUM_TOKENS, RUNS, expected_of, served_by

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WIDE = [
    pytest.param(name, marks=pytest.mark.wide)
    for name in (
        "llama device",
        "sampled",
        "one block",
        "window",
        "window device",
        "window shift",
        "experts",
        "fp8 cache",
        "e5m2 cache",
        "two ranks",
        "drafts",
        "medusa",
        "eagle",
        "eagle3",
        "mtp latent",
        "mtp mimo",
        "fp8 blocks",
        "fp8 experts",
        "fp8 experts w8a8",
        "mxfp4 experts",
        "fp8 blocks w8a8",
        "nvfp4 experts",
        "modelopt fp8",
        "latent",
    )
]


@pytest.mark.parametrize("name", ["llama host", *WIDE])
def test_our_calls_are_theirs_but_for_named_differences(
    name: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """Our engine is started as that run of ``RUNS`` starts theirs."""
    theirs = RUNS[name]
    # Theirs under ``additional_config`` are their settings.
    checkpoint = theirs.checkpoint(checkpoints)
    served, options = served_by(theirs, checkpoint)
    options.pop("additional_config", None)
    job = Job(
        served,
        options,
        theirs.rounds(),
        NUM_TOKENS,
        reference=theirs.reference(checkpoint),
        cache_scales=theirs.cache_scales,
        sampling=theirs.sampling,
    )
    environment = dict(theirs.environment)
    if theirs.device_tensors:
        # As theirs are started, see ``vendor_environment``.
        environment |= torch_rbln_variables() | {"VLLM_RBLN_AUTO_PORT": "0"}
    # Theirs compiled everything.
    rbln = {"sample_on_device": theirs.device_tensors, "cache_root": str(tmp_path / "cache")}
    ran = run([job], tmp_path, rbln=rbln, environment=environment, **dict(theirs.double))
    assert ran.answers == [expected_of(theirs, checkpoint)]
    forms = (call_form(ran.log), kept_call_forms()[name])
    assert unexplained(*forms, allowed_in(name)) == []
    assert unused(*forms, shown_in(name)) == []


def test_every_kept_form_is_compared() -> None:
    """Or differs from a compared one by its host or by the number of its blocks alone."""
    compared = {"llama host", *(name for param in WIDE for name in param.values)}
    assert set(kept_call_forms()) - compared == {"compile only", "whole device"}


def test_a_fact_that_nobody_names_is_told() -> None:
    """The comparison bites: an op with one argument less, and a mode that is not sent."""
    theirs = kept_call_forms()["llama host"]
    op = next(fact for fact in theirs if fact.startswith("op flash_causal_attention_naive_prefill"))
    mode = "option prefill mode=['strict']"
    ours = [fact for fact in theirs if fact not in (op, mode)] + [op.replace(", None)", ")")]
    told = [line.split("(")[0] for line in unexplained(ours, theirs, ())]
    assert told == [
        "ours: op flash_causal_attention_naive_prefill",
        "theirs: op flash_causal_attention_naive_prefill",
        f"theirs: {mode}",
    ]
