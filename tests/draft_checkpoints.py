"""Checkpoints of draft models for tiny served ones, which are right some of the time, or never."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
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
    states = hidden_states(served, texts)
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


def fitted_eagle(
    folder: Path, served: Path, texts: Sequence[Sequence[int]], *, last: int | None = None
) -> Path:
    """Write EAGLE's layer for the Llama ``served``, fitted to the ``last`` tokens of ``texts``.

    ``fc`` is the least-squares map of a token's embedding and the hidden state before it to the
    token's own hidden state. Attention and MLP add a little to that.
    """
    states = hidden_states(served, texts)
    table = load_file(served / "model.safetensors")["model.embed_tokens.weight"].float()
    pairs = [
        torch.cat((table[torch.tensor(text[1:])], own[:-1].float()), dim=-1)
        for text, own in zip(texts, states, strict=True)
    ]
    first = 0 if last is None else -last
    wanted = torch.cat([own[1:][first:].float() for own in states])
    pairs = [own[first:] for own in pairs]
    fitted = torch.linalg.lstsq(torch.cat(pairs), wanted, driver="gelsd").solution.T.contiguous()
    return _write_eagle(folder, served, {"fc.weight": fitted}, scale=0.02)


def random_eagle(folder: Path, served: Path) -> Path:
    """Write EAGLE's layer with random weights, whose drafts are wrong."""
    return _write_eagle(folder, served, {}, scale=1.0)


def _write_eagle(folder: Path, served: Path, tensors: dict[str, Tensor], scale: float) -> Path:
    config = json.loads((served / "config.json").read_text())
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(5)

    def drawn(rows: int, columns: int, by: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * by

    width, layer = config["head_dim"], "layers.0."
    own = {
        "fc.weight": drawn(size, 2 * size),
        f"{layer}self_attn.q_proj.weight": drawn(heads * width, size),
        f"{layer}self_attn.k_proj.weight": drawn(kv_heads * width, size),
        f"{layer}self_attn.v_proj.weight": drawn(kv_heads * width, size),
        f"{layer}self_attn.o_proj.weight": drawn(size, heads * width, scale),
        f"{layer}mlp.gate_proj.weight": drawn(inner, size),
        f"{layer}mlp.up_proj.weight": drawn(inner, size),
        f"{layer}mlp.down_proj.weight": drawn(size, inner, scale),
        f"{layer}post_attention_layernorm.weight": torch.ones(size),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(own | tensors, folder / "model.safetensors")
    return folder


def hidden_states(served: Path, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return transformers' hidden states [tokens, H] of each text, after the last norm."""
    return _process().submit(_states, served, [list(text) for text in texts]).result()


def _states(served: Path, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    model = _load(served, None).base_model
    with torch.inference_mode():
        return [model(torch.tensor([text])).last_hidden_state[0].clone() for text in texts]


def _sizes(served: Path) -> tuple[int, int]:
    """Return the hidden size and the size of the vocabulary of a checkpoint."""
    config = json.loads((served / "config.json").read_text())
    return config["hidden_size"], config["vocab_size"]
