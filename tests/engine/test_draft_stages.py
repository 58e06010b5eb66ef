"""Drafts of engines with pipeline stages change no token of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines
from tests.engine.test_draft_models import speculation_of
from tests.engine.test_draft_ranks import TENSOR, assert_same_tokens, texts_of
from tests.engine.test_mtp import MTP
from tests.engine.test_speculation import NGRAM
from tests.fitted_drafts import FITTED
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Each stage has steps of up to 4 requests.
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "max_num_seqs": 8}


OFTEN = ("eagle3", "llama")
FAMILIES = ("minimax_m2", "mistral_full", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
SELDOM = [("medusa", "llama"), ("eagle", "llama"), *(("eagle3", arch) for arch in FAMILIES)]


@pytest.mark.parametrize(
    ("method", "arch"), [OFTEN, *(pytest.param(*case, marks=pytest.mark.wide) for case in SELDOM)]
)
def test_two_stages(engines: Engines, tmp_path: Path, method: str, arch: str) -> None:
    plain = engines(arch)
    own = FITTED[method](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    served, speculation = plain.checkpoint, speculation_of(method, own)
    assert_same_tokens(served, served, speculation, tmp_path, STAGES, least_share=0.6)


@pytest.mark.wide
def test_two_stages_of_two_ranks(engines: Engines, tmp_path: Path) -> None:
    """Each rank of the last stage gets its part of the embedding from the first stage."""
    plain = engines("llama")
    own = FITTED["eagle3"](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    served, speculation = plain.checkpoint, speculation_of("eagle3", own)
    ranks = STAGES | TENSOR
    assert_same_tokens(served, served, speculation, tmp_path, ranks, least_share=0.6)


@pytest.mark.wide
@pytest.mark.parametrize("family", [name for name in MTP_LAYERS if name != "ernie4_5_moe"])
def test_two_stages_with_mtp(engines: Engines, tmp_path: Path, family: str) -> None:
    maker = MtpMaker(family, engines.checkpoints)
    plain = engines(maker.family.served)
    own = maker.fitted(tmp_path / "own", texts_of(plain), last=41)
    assert_same_tokens(plain.checkpoint, own, MTP, tmp_path, STAGES, least_share=0.5)


def test_stages_of_ernie_are_refused(engines: Engines, tmp_path: Path) -> None:
    maker = MtpMaker("ernie4_5_moe", engines.checkpoints)
    with pytest.raises(ValueError, match=r"method 'mtp' of ErnieMTPModel: speculative decoding of"):
        engines.fresh(checkpoint=maker.random(tmp_path), speculative_config=MTP, **STAGES)


def test_two_stages_without_a_draft_model(engines: Engines, tmp_path: Path) -> None:
    served = engines("llama").checkpoint
    assert_same_tokens(served, served, NGRAM, tmp_path, STAGES, least_share=0.4)
