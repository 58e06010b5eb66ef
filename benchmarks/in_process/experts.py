"""Cost of experts: one layer's ops by the experts that they read, and whole engines.

    python -m benchmarks experts [--rows 1 8 64] [--batch 1 8] [--rounds 3] [--save]

The layer is measured in this process with cold weights, as in a model. Engines are measured by the
rules of ``decode``: ours by its optimised and its plain path, and vLLM's CPU backend.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines.engine_process import OURS, Side, vllm_cpu_all_cores
from benchmarks.in_process.decode import check_lengths, measure_model, method
from benchmarks.in_process.kernels import best_seconds
from benchmarks.models.experts_model import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, moe_checkpoint
from benchmarks.runner.command import Command, begin, positive, say
from benchmarks.runner.figures import Figure, FigureRun, markdown, to_json
from rbln_backend.emulator.kernel_set import load_kernels

OPS = torch.ops.rbln_emulator
_BYTES_PER_EXPERT = 3 * HIDDEN * INTERMEDIATE * 2
_PLAIN = {"VLLM_RBLN_MOE_USE_OPT_KERNEL": "0", "VLLM_RBLN_MOE_CUSTOM_KERNEL": "0"}
OURS_PLAIN = Side(
    name="ours-native",
    platform=OURS.platform,
    env={**OURS.env, **_PLAIN},
    note="the same with plain operators: every expert over every row",
)


_PEERS = [OURS_PLAIN.name, "vllm-cpu-all-cores"]


class _Layers:
    """Layers of packed experts, enough that each is out of the cache when it is used."""

    def __init__(self, copies: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plain = [
            (_random(generator, 2 * INTERMEDIATE, HIDDEN), _random(generator, HIDDEN, INTERMEDIATE))
            for _ in range(copies)
        ]
        packed = [(_packed(w13), _packed(w2)) for w13, w2 in self.plain]
        self.packed = itertools.cycle(packed)
        self.unpacked = itertools.cycle(self.plain)

    def opt(self, x: Tensor, logits: Tensor) -> Tensor:
        """Run the routing op, then the op that reads the chosen experts."""
        weights, ids = OPS.moe_route(logits, TOP_K, True)
        w13, w2 = next(self.packed)
        mixed: Tensor = OPS.moe(x, weights, ids, w13, None, w2, None, INTERMEDIATE, "silu")
        return mixed

    def custom(self, x: Tensor, logits: Tensor) -> Tensor:
        """Run the custom kernel's op with weights by expert."""
        by_expert = _by_expert(logits)
        counts = (by_expert != 0).sum(dim=0, dtype=torch.int32)
        w13, w2 = next(self.packed)
        mixed: Tensor = OPS.moe_masked(
            x, by_expert, counts, w13, None, w2, None, INTERMEDIATE, "silu"
        )
        return mixed

    def native(self, x: Tensor, logits: Tensor) -> Tensor:
        """Run every expert over every row, by the kernels of linear layers."""
        by_expert = _by_expert(logits)
        w13, w2 = next(self.packed)
        total: Tensor = torch.zeros(x.shape)
        for number in range(EXPERTS):
            gate_up = OPS.linear(x, w13[number], None, 2 * INTERMEDIATE)
            inner = OPS.activate(gate_up, "silu", True)
            share = by_expert[:, number : number + 1]
            total += OPS.linear(inner, w2[number], None, HIDDEN).float() * share
        summed: Tensor = total.to(x.dtype)
        return summed

    def torch_grouped(self, x: Tensor, logits: Tensor) -> Tensor:
        """Run the chosen experts in PyTorch, as in transformers."""
        weights, ids = _routed(logits)
        w13, w2 = next(self.unpacked)
        total: Tensor = torch.zeros_like(x)
        for number in ids.unique().tolist():
            rows, slots = (ids == number).nonzero(as_tuple=True)
            gate, up = (x[rows] @ w13[number].t()).chunk(2, dim=-1)
            out = (torch.nn.functional.silu(gate) * up) @ w2[number].t()
            total.index_add_(0, rows, out * weights[rows, slots, None].to(x.dtype))
        return total


def _random(generator: torch.Generator, columns: int, depth: int) -> Tensor:
    plain = torch.randn(EXPERTS, columns, depth, generator=generator)
    return plain.mul(float(depth**-0.5)).bfloat16()


def _packed(matrices: Tensor) -> Tensor:
    return torch.stack([OPS.pack_linear_weight(matrix) for matrix in matrices])


def _routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = logits.float().topk(TOP_K, dim=-1)
    return best.softmax(dim=-1), ids


def _by_expert(logits: Tensor) -> Tensor:
    weights, ids = _routed(logits)
    spread: Tensor = torch.zeros(logits.shape).scatter(1, ids, weights)
    return spread


def measure_layer(layers: _Layers, rows: int) -> list[Figure]:
    """Time each path over the same rows."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(rows, EXPERTS, generator=generator).bfloat16()
    chosen = int(_routed(logits)[1].unique().numel())
    read = chosen * _BYTES_PER_EXPERT / 1e6
    figure = partial(
        Figure,
        name=f"{rows} rows, {chosen} experts of {read:.1f} MB chosen",
        model="One layer of experts",
        unit="ms",
    )
    paths = {
        "opt": layers.opt,
        "custom": layers.custom,
        "native": layers.native,
        "torch": layers.torch_grouped,
    }
    return [
        figure(side=name, values=[1e3 * best_seconds(lambda path=path: path(x, logits))])  # type: ignore[misc]
        for name, path in paths.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("experts", _parser(), _measure, markdown, to_json).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__)
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 2, 8, 64])
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8])
    parser.add_argument(
        "--side", nargs="*", choices=_PEERS, default=_PEERS, help="ours is compared with these"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--prompt-tokens", type=positive, default=32)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--cache-root", type=Path, default=Path.home() / ".cache" / "vllm")
    return parser


def _measure(args: argparse.Namespace, command: str) -> FigureRun:
    check_lengths(args)
    begun = begin(command)
    load_kernels(args.cache_root, "native")
    layers = _Layers(copies=3)
    with torch.inference_mode():
        figures = [figure for rows in args.rows for figure in measure_layer(layers, rows)]
    del layers
    say("one layer is measured")
    peers = {side.name: side for side in (OURS_PLAIN, vllm_cpu_all_cores())}
    sides = [OURS, *(peers[name] for name in args.side)]
    return FigureRun(
        **begun,
        about="Experts",
        sides={side.name: side.note for side in sides},
        figures=[*figures, *measure_model(moe_checkpoint(), sides, args)],
        notes=[method(args), _LAYER],
    )


_LAYER = (
    f"One layer: {EXPERTS} experts of {HIDDEN} x {INTERMEDIATE}, {TOP_K} a row, bfloat16; an "
    f"expert has {_BYTES_PER_EXPERT / 1e6:.2f} MB. `opt` and `custom` read the chosen experts, "
    "`native` all. `torch` computes the chosen ones as transformers does. Best of several passes. "
    "*Of the bandwidth* of an engine counts the bytes that one row chooses; a batch chooses more."
)
