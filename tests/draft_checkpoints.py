"""Checkpoints of draft models for tiny served ones, which are right some of the time, or never."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint_families import VOCAB_SIZE
from tests.reference import _load, _process


def write_medusa(
    folder: Path,
    *,
    hidden_size: int = 128,
    vocab_size: int = VOCAB_SIZE,
    heads: int = 3,
    tensors: dict[str, Tensor] | None = None,
    **fields: object,
) -> Path:
    """Write Medusa's heads into ``folder``, which is returned; without ``tensors`` a config."""
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_hidden_layers": 1}
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_heads": heads}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | sizes | fields))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def random_medusa(folder: Path, served: Path, *, heads: int = 3) -> Path:
    """Write heads of random weights, whose drafts are wrong."""
    hidden_size, vocab_size = _sizes(served)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors = {}
    for head in range(heads):
        tensors[f"blocks.{head}.layers.0.weight"] = drawn(hidden_size, hidden_size)
        tensors[f"lm_heads.{head}.weight"] = drawn(vocab_size, hidden_size)
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    return write_medusa(folder, heads=heads, tensors=tensors, **sizes)


def fitted_medusa(
    folder: Path,
    served: Path,
    texts: Sequence[Sequence[int]],
    *,
    heads: int = 3,
    last: int | None = None,
) -> Path:
    """Write heads that are fitted to ``texts``, prompts and answers of the model ``served``.

    The heads' layers are nearly the identity. Each LM head is the least-squares map of the hidden
    states to the tokens that come 2, 3, … places later: right for most of them. ``last``: the
    tokens of each text that count, None for all.
    """
    hidden_size, vocab_size = _sizes(served)
    first = 0 if last is None else -last
    states = _process().submit(_states, served, [list(text) for text in texts]).result()
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for head in range(heads):
        block = torch.randn(hidden_size, hidden_size, generator=generator) * 0.01
        rows = torch.cat([own[: -2 - head][first:] for own in states]).float()
        rows = rows + torch.nn.functional.silu(rows @ block.T)
        later = torch.cat([torch.tensor(text[2 + head :][first:]) for text in texts])
        wanted = torch.nn.functional.one_hot(later, vocab_size).float()
        tensors[f"blocks.{head}.layers.0.weight"] = block
        fitted = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution.T.contiguous()
        tensors[f"lm_heads.{head}.weight"] = fitted
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    return write_medusa(folder, heads=heads, tensors=tensors, **sizes)


def _states(served: Path, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the hidden states [tokens, H] of each text, after the last norm."""
    model = _load(served, None).base_model
    with torch.inference_mode():
        return [model(torch.tensor([text])).last_hidden_state[0].clone() for text in texts]


def _sizes(served: Path) -> tuple[int, int]:
    """Return the hidden size and the size of the vocabulary of a checkpoint."""
    config = json.loads((served / "config.json").read_text())
    return config["hidden_size"], config["vocab_size"]
