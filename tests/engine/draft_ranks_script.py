"""Drafts of an engine of several ranks, in a process of its own run by ``run_script``.

The argument is ``[served checkpoint, checkpoint of the drafted engine, --speculative-config,
options of the drafted engine, folder, least share of accepted drafts]``. The assertions are those
of one rank; the engine without drafts has one rank. The result has pairs of a text and its drafts,
where there is a reference for them.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from vllm import SamplingParams

from tests.engine.conftest import Engines
from tests.engine.support import FEWER, MOST, AnyLength, Oracle, make_prompts
from tests.engine.test_draft_models import REFERENCES, Drafted, record_drafts
from tests.engine.test_speculation import OFF, greedy, results, texts_of

SHARED = ("kv_cache_dtype",)
"""Options of both engines."""


class DraftedRanks(Drafted):
    """An engine of one rank without speculation, and one of several with a draft model."""

    def check(self, lengths: AnyLength) -> None:
        """As of one rank; all ranks draft after the same steps."""
        self._on_ranks(_choose, lengths)

    def expected(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        """Return answers of one rank; of tensor-parallel ranks, sampled ones without drafts.

        Rounding, which differs by their number, may change a sampled token.
        """
        alone = super().expected(prompts, params)
        is_split = self.own.core.vllm_config.parallel_config.tensor_parallel_size > 1
        places = [place for place, own in enumerate(params) if is_split and own.seed is not None]
        if not places:
            return alone
        plain = [params[place].clone() for place in places]
        for own in plain:
            own.extra_args = OFF
        sampled = results(self.own, [prompts[place] for place in places], plain)
        for place, answer in zip(places, sampled, strict=True):
            alone[place] = answer
        return alone

    def remembered(self) -> list[int]:
        return [count for counts in self._on_ranks(_remembered) for count in counts]

    def seen(self) -> list[Any]:
        """Return texts that the draft model was not fitted to, with its drafts."""
        self.check(AnyLength(MOST + 1))
        self._on_ranks(_record)
        self.run(make_prompts([130, 70, 9], seed=47), [greedy(max_tokens=12)] * 3)
        # Tensor-parallel ranks of the last stage make the same drafts.
        seen, *others = filter(None, self._on_ranks(_recorded))
        assert all(own == seen for own in others)
        return random.Random(8).sample(seen, 6) + seen[:3] + seen[-3:]

    def _on_ranks(self, function: Any, *args: Any) -> list[Any]:
        results = self.own.core.model_executor.collective_rpc(function, args=args)
        return cast("list[Any]", results)


class GuessingRanks(DraftedRanks):
    """The same without a draft model: an oracle drafts the answers, with some wrong tokens."""

    def expected(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        """Return answers of one rank, of which drafts are made from now on."""
        answers = super().expected(prompts, params)
        # The second are of `assert_idle`.
        self._on_ranks(_guess, texts_of(prompts, answers) | {(7,): []})
        return answers


def _drafting(worker: Any) -> Any:
    """Return the drafting of a rank; None of a stage that makes no tokens."""
    return getattr(worker.worker._runner, "_drafting", None)


def _choose(worker: Any, lengths: AnyLength) -> None:
    drafting = _drafting(worker)
    if drafting is not None:
        drafting._budget = lengths


def _keep_budget(worker: Any) -> None:
    """Keep a rank's own budget for ``_use_budget``; one that makes no drafts has none."""
    if (budget := getattr(_drafting(worker), "_budget", None)) is not None:
        _drafting(worker).kept_budget = budget


def _use_budget(worker: Any) -> None:
    """Use the rank's own budget; drafts never pay by the times of any rank but the first."""
    budget = getattr(_drafting(worker), "kept_budget", None)
    if budget is None:
        return
    _drafting(worker)._budget = budget
    if not worker.worker._place.replies:
        checked = budget.checked
        budget.checked = lambda bucket, seconds, tokens: checked(bucket, 99 * seconds, tokens)


def _guess(worker: Any, texts: dict[tuple[int, ...], list[int]]) -> None:
    if worker.worker._place.replies:
        drafting = _drafting(worker)
        if not isinstance(drafting._drafter, Oracle):
            drafting._drafter = Oracle({}, lies=0.2)
        drafting._drafter.texts |= texts


def _record(worker: Any) -> None:
    if (drafting := _drafting(worker)) is not None:
        drafting.seen = record_drafts(cast("Any", SimpleNamespace(model=drafting._model)))


def _recorded(worker: Any) -> Any:
    return getattr(_drafting(worker), "seen", None)


def _remembered(worker: Any) -> list[int]:
    drafting = _drafting(worker)
    if drafting is None:
        return [len(worker.worker._runner.batches._drafts)]
    model = drafting._model
    if model is None:
        return [len(drafting._begun), len(drafting._drafter._going)]
    return [len(model._drafts), len(getattr(model._source, "_unread", ()))]


def main(
    served: str, drafted: str, speculation: Any, options: Any, root: str, least_share: float
) -> None:
    engines = Engines(cast("Any", None), Path(root))
    # Its ranks are forks of a process without a world of its own.
    own = engines.fresh(
        checkpoint=Path(drafted),
        speculative_config=speculation,
        rbln=FEWER,
        num_gpu_blocks_override=34,
        disable_log_stats=False,
        **options,
    )
    try:
        is_staged = "pipeline_parallel_size" in options
        shared = {name: options[name] for name in SHARED if name in options}
        plain, method = engines.fresh(checkpoint=Path(served), **shared), speculation["method"]
        ranks = GuessingRanks if method == "ngram" else DraftedRanks
        pair = ranks(plain, own, method, logprobs=None)
        pair._on_ranks(_keep_budget)
        pair.assert_fewer_steps(least_share)
        pair.assert_same_after_preemption_and_hits()
        pair.assert_same_with_aborts(random.Random(0))
        seen = pair.seen() if method in REFERENCES and is_staged else []
        # The first rank decides when the ranks draft and pause.
        pair._on_ranks(_use_budget)
        pair.run([[7] * 20, [9] * 5], pair._ways()[:2])
    finally:
        own.core.shutdown()
    sys.stdout.write(f"RESULT {json.dumps(seen)}\n")


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
