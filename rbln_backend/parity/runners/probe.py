"""Hidden states of every layer of an engine over given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from rbln_backend.parity.job import FloatArray, Layers, Side
from rbln_backend.parity.runners.engines import OfflineEngine
from rbln_backend.parity.runners.forced_tokens import FORCED_TOKENS
from rbln_backend.parity.runners.layers import tapped


def probe(engine: OfflineEngine, side: Side, token_ids: Sequence[int], num_decoded: int) -> Layers:
    """Return the states of every layer over ``token_ids``; the last ones run as decode steps."""
    split = len(token_ids) - num_decoded
    # The engine also generates the token after the last one, which is ignored.
    forced = [*token_ids[split:], token_ids[-1]]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_decoded + 1,
        ignore_eos=True,
        detokenize=False,
        extra_args={FORCED_TOKENS: forced},
    )
    states_of = _graph_states if side == "rbln" else _eager_states
    names, states = states_of(engine, list(token_ids[:split]), params)
    return Layers(names=tuple(names), states=np.stack(states)[:, : len(token_ids)])


def _graph_states(
    engine: OfflineEngine, prompt: list[int], params: SamplingParams
) -> tuple[list[str], list[FloatArray]]:
    """Return the states of compiled graphs; see ``ProbeWorker``."""
    engine.llm.collective_rpc("start_probe")
    engine.generate([prompt], [params])
    names, states = engine.llm.collective_rpc("take_probe")[0]
    return names, states


def _eager_states(
    engine: OfflineEngine, prompt: list[int], params: SamplingParams
) -> tuple[list[str], list[FloatArray]]:
    """Return the states of a reference, which runs eagerly with hooks on its layers."""
    taken: list[torch.Tensor] = []
    model: Any = engine.llm.apply_model(_itself)[0]
    with tapped(model, lambda state: taken.append(state.detach().float().clone())) as names:
        engine.generate([prompt], [params])
    count = len(names)
    rows = [torch.cat([s.reshape(-1, s.shape[-1]) for s in taken[i::count]]) for i in range(count)]
    return names, [row.numpy() for row in rows]


def _itself(model: Any) -> Any:
    return model
