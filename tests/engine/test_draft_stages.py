"""Drafts of engines with pipeline stages change no token of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines
from tests.engine.test_draft_models import RIGHT, speculation_of
from tests.engine.test_draft_ranks import assert_same_tokens, texts_of
from tests.engine.test_speculation import NGRAM

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
    own = RIGHT[method](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    served, speculation = plain.checkpoint, speculation_of(method, own)
    assert_same_tokens(served, served, speculation, tmp_path, STAGES, least_share=0.6)


def test_two_stages_without_a_draft_model(engines: Engines, tmp_path: Path) -> None:
    served = engines("llama").checkpoint
    assert_same_tokens(served, served, NGRAM, tmp_path, STAGES, least_share=0.4)
