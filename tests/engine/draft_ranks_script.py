"""A draft model over two tensor-parallel ranks, in a process of its own run by ``run_script``.

The argument is ``[served checkpoint, checkpoint of the drafted engine, --speculative-config,
options of the drafted engine, folder, least share of accepted drafts]``. The assertions are those
of one rank; the engine without drafts has one rank.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, cast

from vllm import SamplingParams

from tests.engine.conftest import Engines
from tests.engine.oracle import AnyLength
from tests.engine.test_draft_models import Drafted
from tests.engine.test_speculation import FEW, OFF, results


class DraftedRanks(Drafted):
    """An engine of one rank without speculation, and one of several with a draft model."""

    def check(self, lengths: AnyLength) -> None:
        """As of one rank; by the times of all ranks but the first, drafts never pay."""
        self._on_ranks(_choose, lengths)

    def expected(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        """Return greedy answers of one rank, and sampled ones of these ranks without drafts.

        Rounding, which differs by the number of ranks, may change a sampled token.
        """
        alone = super().expected(prompts, params)
        places = [place for place, own in enumerate(params) if own.seed is not None]
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
        """As of one rank, on every rank."""
        return [count for counts in self._on_ranks(_remembered) for count in counts]

    def _on_ranks(self, function: Any, *args: Any) -> list[Any]:
        results = self.own.core.model_executor.collective_rpc(function, args=args)
        return cast("list[Any]", results)


def _drafting(worker: Any) -> Any:
    return worker.worker._runner._drafting


def _choose(worker: Any, lengths: AnyLength) -> None:
    drafting = _drafting(worker)
    drafting._chooser = lengths if worker.worker.rank == 0 else AnyLength(most=1)


def _remembered(worker: Any) -> list[int]:
    model = _drafting(worker)._model
    return [len(model._drafts), len(getattr(model._source, "_unread", ()))]


def main(
    served: str, drafted: str, speculation: Any, options: Any, root: str, least_share: float
) -> None:
    engines = Engines(cast("Any", None), Path(root))
    # Its ranks are forks of a process without a world of its own.
    own = engines.fresh(
        checkpoint=Path(drafted),
        speculative_config=speculation,
        rbln=FEW,
        num_gpu_blocks_override=34,
        disable_log_stats=False,
        **options,
    )
    try:
        plain = engines.fresh(checkpoint=Path(served))
        pair = DraftedRanks(plain, own, speculation["method"], logprobs=None)
        pair.assert_fewer_steps(least_share)
        pair.assert_same_after_preemption_and_hits()
        pair.assert_same_with_aborts(random.Random(0))
        # Of no length do drafts pay: the ranks pause together.
        pair.check(AnyLength(most=1))
        pair.run([[7] * 20, [9] * 5], pair._ways()[:2])
    finally:
        own.core.shutdown()
    sys.stdout.write(f"RESULT {json.dumps(pair.share())}\n")


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
