"""Muon for the matrices of the hidden layers: momentum whose update is orthogonal.

torch.optim.Muon multiplies in bfloat16 on every processor; see `default_model.precision`.
"""

from __future__ import annotations

import torch

from default_model.precision import fast_products

# A quintic whose iteration drives all singular values towards 1 (Keller Jordan, "Muon", 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix of `matrix` [rows, columns], roughly."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: torch.Tensor = wide / (wide.norm() + 1e-7)
    with fast_products():
        for _ in range(_ITERATIONS):
            gram = x @ x.T
            x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if wide is matrix else x.T


def muon_step(
    weight: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, *, lr: float, decay: float
) -> None:
    """Update `weight` and `momentum`, both float32 [rows, columns], in place."""
    momentum.mul_(decay).add_(grad)
    update = orthogonal(grad + decay * momentum)
    weight.add_(update, alpha=-lr * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)
