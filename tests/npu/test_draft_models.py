"""Draft models over the double: the heads' graph, and hidden states of the decode graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rbln_backend.graphs.bundles import collect, write_folder
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import fitted_eagle, fitted_medusa, random_eagle, random_medusa
from tests.e5m2_cache import answers_over_e5m2_cache
from tests.npu.engines import Job, Ran, run
from tests.npu.test_drafts import BATCHES, CONTEXT, LENGTH, MOST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft-models")


@pytest.fixture(scope="module")
def fitted(checkpoints: CheckpointCache, folder: Path) -> Job:
    served = checkpoints("llama", max_position_embeddings=CONTEXT)
    job = Job(served, {"max_model_len": CONTEXT}, BATCHES, LENGTH, checks_all_drafts=True)
    batch, answers = job.batches[0], job.expected()[0]
    texts = [prompt + answer for prompt, answer in zip(batch, answers, strict=True)]
    return with_heads(job, fitted_medusa(folder / "fitted", served, texts, last=LENGTH))


def with_heads(job: Job, heads: Path) -> Job:
    """Return ``job`` with Medusa's heads."""
    return with_model(job, "medusa", heads)


def with_model(job: Job, method: str, own: Path) -> Job:
    """Return ``job`` with the draft model ``own``."""
    speculation = {"method": method, "model": str(own), "num_speculative_tokens": MOST}
    return replace(job, options=job.options | {"speculative_config": speculation})


@pytest.fixture(scope="module")
def cold(fitted: Job, folder: Path) -> Ran:
    return run([fitted], folder)


def test_right_drafts_of_heads_save_steps(fitted: Job, folder: Path, cold: Ran) -> None:
    """Random heads give the same answers in more steps, each of which runs the heads as well."""
    assert cold.answers == [fitted.expected()]
    # A prefill; steps of 1, 2 and 4 requests, with one token and with four; heads; the LM head.
    assert len(cold.calls("compile")) == 1 + 3 * 2 + 3 + 1
    wrong = with_heads(fitted, random_medusa(folder / "random", fitted.checkpoint))
    ran = run([wrong], folder)
    assert ran.answers == cold.answers
    assert len(cold.calls("run")) < 0.7 * len(ran.calls("run"))


def test_warm_answers_are_transformers(fitted: Job, folder: Path, cold: Ran) -> None:
    warm = run([fitted], folder)
    assert warm.answers == cold.answers
    assert all(call["hit"] for call in warm.calls("compile"))


def assert_steps_saved(job: Job, cold: Ran, wrong: Ran) -> None:
    """Assert transformers' answers of right drafts and of ``wrong`` ones, in more steps of it.

    Of a draft model with a KV cache.
    """
    assert cold.answers == wrong.answers == [job.expected()]
    # A prefill; steps of 1, 2 and 4 requests with 1 and 4 tokens, of both models; the draft
    # model's prefill; the LM head.
    assert len(cold.calls("compile")) == 1 + 2 * 3 * 2 + 1 + 1
    assert len(cold.calls("run")) < 0.8 * len(wrong.calls("run"))


def assert_same_from_stored_graphs(job: Job, folder: Path, cold: Ran, elsewhere: Path) -> None:
    """Assert equal answers of ``cold``'s graphs, in its ``folder`` and over a bundle of them."""
    bundle = elsewhere / "bundle"
    warm = run([job], folder)
    write_folder(bundle, collect(folder / "cache", GraphChecks()))
    bundled = run([job], elsewhere / "host", rbln={"cache_bundles": [str(bundle)]})
    for ran in (warm, bundled):
        assert ran.answers == cold.answers
        assert all(call["hit"] for call in ran.calls("compile"))


def assert_same_with_seeds(job: Job, folder: Path) -> None:
    """Assert that sampled tokens are those of the same engine without a draft model."""
    seeded = replace(job, seed=5)
    plain = replace(seeded, options={"max_model_len": CONTEXT}, checks_all_drafts=False)
    drafted, single = (run([own], folder) for own in (seeded, plain))
    assert drafted.answers == single.answers != [job.expected()]


@pytest.mark.wide
def test_seeds_give_the_same_with_a_draft_model(fitted: Job, folder: Path) -> None:
    assert_same_with_seeds(fitted, folder)


@pytest.mark.wide
def test_host_sampling_reads_the_logits_before_the_hidden_states(
    fitted: Job, folder: Path, cold: Ran
) -> None:
    """Without ``argmax`` in the decode graphs; the heads' graphs end in it all the same."""
    ran = run([fitted], folder / "host", rbln={"sampler": False})
    assert ran.answers == cold.answers


@pytest.fixture(scope="module")
def layer(fitted: Job, folder: Path) -> Job:
    """EAGLE's layer, which attends to a KV cache of its own."""
    batch, answers = fitted.batches[0], fitted.expected()[0]
    texts = [prompt + answer for prompt, answer in zip(batch, answers, strict=True)]
    own = fitted_eagle(folder / "layer", fitted.checkpoint, texts, last=LENGTH + 1)
    return with_model(fitted, "eagle", own)


def test_right_drafts_of_a_layer_save_steps(layer: Job, folder: Path) -> None:
    """Random weights give the same answers in more steps."""
    right = run([layer], folder / "eagle")
    assert right.answers == [layer.expected()]
    # A prefill; steps of 1, 2 and 4 requests with 1 and 4 tokens, of the model and of the layer;
    # the layer's prefill; the LM head.
    assert len(right.calls("compile")) == 1 + 2 * 3 * 2 + 1 + 1
    own = random_eagle(folder / "random-layer", layer.checkpoint)
    wrong = run([with_model(layer, "eagle", own)], folder / "eagle")
    assert wrong.answers == right.answers
    assert len(right.calls("run")) < 0.8 * len(wrong.calls("run"))


@pytest.mark.wide
def test_a_layer_over_a_cache_of_e5m2(layer: Job, folder: Path) -> None:
    """Its own cache is of e5m2 as well; scales are 1.0."""
    options = layer.options | {"kv_cache_dtype": "fp8_e5m2"}
    (batch,), ones = layer.batches[:1], ((1.0, 1.0),) * 3
    answers = answers_over_e5m2_cache(layer.checkpoint, batch, LENGTH, ones)
    job = replace(layer, options=options, batches=[batch])
    assert [answers] != job.expected()
    texts = [prompt + answer for prompt, answer in zip(batch, answers, strict=True)]
    fitted = fitted_eagle(folder / "e5m2-layer", job.checkpoint, texts, last=LENGTH + 1)
    right = run([with_model(job, "eagle", fitted)], folder / "e5m2")
    assert_cache_dtype(right, "torch.float8_e5m2")
    own = random_eagle(folder / "random-e5m2", layer.checkpoint)
    assert_fewer_runs([[answers]], right, run([with_model(job, "eagle", own)], folder / "e5m2"))


def assert_cache_dtype(ran: Ran, dtype: str) -> None:
    """Assert that every attention op reads and writes a cache of ``dtype``."""
    ops = [op for call in ran.calls("compile") for op in call["sdk_ops"]]
    assert {arguments[-1] for name, arguments in ops if "causal" in name} == {dtype}


def assert_fewer_runs(answers: list[list[list[list[int]]]], right: Ran, wrong: Ran) -> None:
    """Assert the same ``answers`` of right and of wrong drafts, in fewer runs of right ones.

    Both draft models have the same graphs.
    """
    assert right.answers == wrong.answers == answers
    assert all(call["hit"] for call in wrong.calls("compile"))
    assert len(right.calls("run")) < 0.8 * len(wrong.calls("run"))


@pytest.mark.wide
def test_warm_and_seeded_answers_with_a_layer(layer: Job, folder: Path) -> None:
    warm = run([layer], folder / "eagle")
    assert all(call["hit"] for call in warm.calls("compile"))
    assert warm.answers == [layer.expected()]
    assert_same_with_seeds(layer, folder)
