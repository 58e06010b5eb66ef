"""Where our calls of the SDK differ from the vendor's, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Difference:
    """Facts of ``call_form`` that only ``whose`` calls show."""

    whose: Literal["ours", "theirs"]
    pattern: str
    """Matches the whole fact."""
    reason: str


ALLOWED = (
    Difference(
        "theirs",
        r"(op rbln::(top_k_top_p|rejection_sample)|input sampler|option sampler) ?.*",
        "their sampler is graphs of its own; our model graphs end in argmax, as those of their "
        "drafters, and other tokens are sampled by vLLM on the host, or with device tensors drawn "
        "by graphs that take both k and p",
    ),
    Difference(
        "ours",
        r"(input|option|collective) head .*",
        "the logits of a prompt are a graph of their own here; theirs are computed with the prompt",
    ),
    Difference(
        "theirs",
        r"input prefill (host on cpu|device on rbln) int32 2d",
        "their token ids are int32, ours int64, as vLLM's are; their sources say that the compiler "
        "converts integer inputs (backends/flash_attention.py, RBLNFlashAttentionMetadata)",
    ),
    Difference(
        "ours",
        r"input prefill (host on cpu|device on rbln) int64 1d",
        "the place of the last token is int32 with them, int64 with us; converted as token ids are",
    ),
)

_PADDING_MASK = (
    Difference(
        "theirs",
        r"input decode host on cpu int32 1d",
        "their mask of padding tokens is made in the graph, from how many tokens each data-"
        "parallel engine has; ours comes ready",
    ),
)
_DRAFT_LAYER = (
    Difference(
        "theirs",
        r"input (prefill|decode) host on cpu float32 3d",
        "hidden states before a layer have an axis for the batch; ours have all tokens of a "
        "step in one axis, as the model's graphs return them",
    ),
    Difference(
        "theirs",
        r"input decode host on cpu int32 1d",
        "the places that drafts begin from are int32 with them, int64 with us; converted as "
        "token ids are",
    ),
    Difference("ours", r"input decode host on cpu int64 1d", "as above"),
)
OF_RUNS: Mapping[str, tuple[Difference, ...]] = {
    "two ranks": (
        Difference(
            "ours",
            r"environment of rank \d+: RBLN_FORCE_CCL_ASYNC=1",
            "releases before 0.12 set it under model parallelism, and warn of 0; 0.12 does not",
        ),
    ),
    "experts": _PADDING_MASK,
    "fp8 experts": _PADDING_MASK,
    "fp8 experts w8a8": _PADDING_MASK,
    "nvfp4 experts": _PADDING_MASK,
    "eagle": _DRAFT_LAYER,
    "eagle3": _DRAFT_LAYER,
    "mtp mimo": _DRAFT_LAYER,
    "latent": _PADDING_MASK,
    "mtp latent": (*_PADDING_MASK, *_DRAFT_LAYER),
    "medusa": (
        Difference(
            "ours",
            r"(input|option) sampler .*",
            "the graph of the heads ends in argmax, as those of their EAGLE do; with Medusa they "
            "return logits, from which the host picks",
        ),
        Difference(
            "theirs",
            r"option head use_static_output=False",
            "their logits of the heads are new tensors in each run; our drafts are one tensor, "
            "which is read before the next run",
        ),
    ),
    "mxfp4 experts": (
        *_PADDING_MASK,
        Difference(
            "theirs",
            r"input (prefill|decode) host on cpu (uint8 3d|bfloat16 2d)",
            "their experts are buffers of the module, ours its parameters, as all weights are",
        ),
        Difference(
            "ours",
            r"input (prefill|decode) weight on cpu uint8 3d",
            "as above",
        ),
        Difference(
            "theirs",
            r"op custom_moe_glu_mxfp4\(float32 2d, (uint8 3d, uint8 3d, bfloat16 2d, ){3}.*",
            "their biases are bfloat16 in a model of any dtype, ours have the model's",
        ),
        Difference(
            "ours",
            r"op custom_moe_glu_mxfp4\(float32 2d, (uint8 3d, uint8 3d, float32 2d, ){3}.*",
            "as above",
        ),
    ),
}


def allowed_in(run: str) -> tuple[Difference, ...]:
    """The differences of every run, and those of this one."""
    return (*ALLOWED, *OF_RUNS.get(run, ()))


def shown_in(run: str) -> tuple[Difference, ...]:
    """Those that a run must show: its own, and in the plainest one the common ones."""
    return ALLOWED if run == "llama host" else OF_RUNS.get(run, ())


def unexplained(
    ours: Iterable[str], theirs: Iterable[str], allowed: Sequence[Difference]
) -> list[str]:
    """Facts of one side alone that no difference allows, each behind its side's name."""
    return [
        f"{whose}: {fact}"
        for whose, fact in _only(ours, theirs)
        if not any(_allows(difference, whose, fact) for difference in allowed)
    ]


def unused(
    ours: Iterable[str], theirs: Iterable[str], allowed: Sequence[Difference]
) -> list[Difference]:
    """Differences that are none: their lines must go."""
    facts = _only(ours, theirs)
    return [d for d in allowed if not any(_allows(d, whose, fact) for whose, fact in facts)]


def _only(ours: Iterable[str], theirs: Iterable[str]) -> list[tuple[str, str]]:
    mine, others = set(ours), set(theirs)
    found = [("ours", fact) for fact in sorted(mine - others)]
    return found + [("theirs", fact) for fact in sorted(others - mine)]


def _allows(difference: Difference, whose: str, fact: str) -> bool:
    return difference.whose == whose and re.fullmatch(difference.pattern, fact) is not None
