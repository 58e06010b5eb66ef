"""Loss and gradients of a step, on several processor cores.

Each core has a replica that shares the weights and keeps gradients of its own; they are added in a
fixed order, so that a step's result does not depend on who is faster. One thread per core meets the
others once a step: threads inside of operators would meet, and wait, a thousand times.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from default_model.batches import Microbatch, shares
from default_model.precision import fast_products

WORKERS = 2


def batch_loss(model: LlamaForCausalLM, batch: Microbatch) -> torch.Tensor:
    """Return the sum over tokens of weight times cross-entropy; a float32 scalar."""
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    weights = batch.weights[:, 1:]
    real = weights > 0
    logits = hidden[real] @ model.lm_head.weight.T
    losses = functional.cross_entropy(logits, batch.ids[:, 1:][real], reduction="none")
    return (losses * weights[real]).sum()


class Replicas:
    """The model's copies for WORKERS threads."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        torch.set_num_threads(1)
        self._replicas = [model]
        for _ in range(WORKERS - 1):
            replica = copy.deepcopy(model)
            for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
                own.data = shared.data
            self._replicas.append(replica)
        self.pool = ThreadPoolExecutor(WORKERS)

    def _work(self, replica: LlamaForCausalLM, batches: list[Microbatch], scale: float) -> float:
        torch.set_num_threads(1)
        total = 0.0
        for batch in batches:
            with fast_products():
                loss = batch_loss(replica, batch) * scale
            loss.backward()
            total += loss.item()
        return total

    def backward(self, batches: list[Microbatch]) -> float:
        """Leave the gradients of the mean weighted loss in the model; return that loss."""
        scale = 1.0 / sum(float(batch.weights.sum()) for batch in batches)
        for replica in self._replicas:
            replica.zero_grad(set_to_none=True)
        parts = shares(batches, WORKERS)
        jobs = [
            self.pool.submit(self._work, replica, part, scale)
            for replica, part in zip(self._replicas, parts, strict=True)
        ]
        loss = sum(job.result() for job in jobs)
        model, *others = self._replicas
        for other in others:
            for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
                if own.grad is None:
                    own.grad = theirs.grad
                elif theirs.grad is not None:
                    own.grad.add_(theirs.grad)
        return loss
