"""Checkpoints of draft models for tiny served ones, which are right some of the time, or never."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.checkpoint_families import VOCAB_SIZE
from tests.reference import _load, _process, load_over


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


# ---------------------------------------------------------------------------------- eagle reference
class EagleReference:
    """The layer in ``own`` for the Llama ``served``, both float32."""

    def __init__(self, served: Path, own: Path) -> None:
        self._served, self._config = served, json.loads((own / "config.json").read_text())
        tensors = load_file(served / "model.safetensors")
        self._weights, self._head = load_file(own / "model.safetensors"), tensors["lm_head.weight"]
        shared = tensors["model.embed_tokens.weight"]
        self._embedding = self._weights.get("embed_tokens.weight", shared)

    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Return ``count`` drafts after ``text``, of which the last token has no hidden state."""
        tokens = [*text[1:]]
        (hidden,) = hidden_states(self._served, [text[:-1]])
        drafts: list[int] = []
        for _ in range(count):
            layer = self._layer(torch.cat((self._embedding[torch.tensor(tokens)], hidden), dim=-1))
            drafts.append(int((self._head @ layer[-1]).argmax()))
            tokens.append(drafts[-1])
            hidden = torch.cat((hidden, layer[-1:]))
        return drafts

    def _layer(self, pairs: Tensor) -> Tensor:
        """[n, 2 H] to hidden states [n, H]."""
        x = pairs @ self._weights["fc.weight"].T
        x = x + attention(x, self._of, self._config["head_dim"])
        norm = functional.rms_norm(x, x.shape[-1:], self._of("post_attention_layernorm"), self._eps)
        gate, up = (norm @ self._of(f"mlp.{name}").T for name in ("gate_proj", "up_proj"))
        return x + (functional.silu(gate) * up) @ self._of("mlp.down_proj").T

    def _of(self, name: str) -> Tensor:
        return self._weights[f"layers.0.{name}.weight"]

    @property
    def _eps(self) -> float:
        return float(self._config["rms_norm_eps"])


def attention(x: Tensor, weight_of: Callable[[str], Tensor], width: int) -> Tensor:
    """Causal self-attention over x [n, H], heads of ``width``; ``weight_of`` has its matrices."""
    q, k, v = (
        (x @ weight_of(f"self_attn.{name}_proj").T).unflatten(-1, (-1, width)).transpose(0, 1)
        for name in "qkv"
    )
    shown = functional.scaled_dot_product_attention(
        _rotated(q)[None], _rotated(k)[None], v[None], is_causal=True, enable_gqa=True
    )
    return shown[0].transpose(0, 1).flatten(1) @ weight_of("self_attn.o_proj").T


def _rotated(x: Tensor) -> Tensor:
    """Rotate x [heads, n, D] by position, with base 10,000."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# ------------------------------------------------------------------------------- eagle3 checkpoints
# EAGLE-3's layer in plain PyTorch, and checkpoints of it that are right, or never.
#
# A fitted layer gives the hidden state of the next token: the served model's own after its last
# layer, of which rows of the served LM head make the next token.
CacheScales = tuple[tuple[float, float], ...]

INNER = 512
"""Width of the MLP: more than the tokens that a layer is fitted to."""
EPS = 1e-5
NARROW = {"hidden_size": 64, "target_hidden_size": 128}
"""Fields of a layer of half the width of Llama's, which has an embedding of its own."""


class Eagle3Layer:
    """The layer with ``weights`` and ``config``, all float32."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self._config, self._weights = config, weights

    def combined(self, states: Tensor) -> Tensor:
        """[n, 3 H] to hidden states [n, H]."""
        if self._config.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        return states @ self._weights["fc.weight"].T

    def attended(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[n, H] twice to hidden states [n, H] before the MLP."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), dim=-1)
        added = attention(x, self._of, self._config["head_dim"])
        return added + (normed if self._config.get("norm_before_residual") else hidden)

    def inner(self, attended: Tensor) -> Tensor:
        """[n, H] to the MLP's features [n, INNER]."""
        x = self._norm(attended, "midlayer.post_attention_layernorm")
        gate, up = (x @ self._of(f"mlp.{name}").T for name in ("gate_proj", "up_proj"))
        return functional.silu(gate) * up

    def __call__(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] twice to the last logits [V] and the hidden state [1, H] of the next draft."""
        attended = self.attended(embedded, hidden)
        last = (attended + self.inner(attended) @ self._of("mlp.down_proj").T)[-1:]
        normed = self._norm(last, "norm")
        following = normed if self._config.get("norm_output") else last
        return (normed @ self._weights["lm_head.weight"].T)[0], following

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], EPS)

    def _of(self, name: str) -> Tensor:
        return self._weights[f"midlayer.{name}.weight"]


class Eagle3Reference:
    """Drafts of the layer in ``own`` for ``served`` over a whole text."""

    def __init__(self, served: Path, own: Path) -> None:
        self._served = served
        self._config = json.loads((own / "config.json").read_text())
        self._weights = load_file(own / "model.safetensors")
        self._layer = Eagle3Layer(self._config, self._weights)
        shared = load_file(served / "model.safetensors")["model.embed_tokens.weight"]
        self._embedding = self._weights.get("embed_tokens.weight", shared)

    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Return ``count`` drafts after ``text``, of which the last token has no hidden state."""
        (states,) = layer_states(self._served, [text[:-1]])
        ids = self._config["eagle_aux_hidden_state_layer_ids"]
        hidden = self._layer.combined(torch.cat([states[n] for n in ids], dim=-1))
        tokens, drafts = [*text[1:]], list[int]()
        for _ in range(count):
            logits, following = self._layer(self._embedding[torch.tensor(tokens)], hidden)
            draft = int(logits.argmax())
            drafts.append(draft + int(self._weights["d2t"][draft]))
            tokens.append(drafts[-1])
            hidden = torch.cat((hidden, following))
        return drafts


def random_eagle3(folder: Path, served: Path, **fields: object) -> Path:
    """Write a layer of random weights with strong attention, whose drafts are wrong."""
    config, weights = _made(served, _vocabulary(served, set()), fields)
    return _write(folder, config, weights)


def fitted_eagle3(
    folder: Path,
    served: Path,
    texts: Sequence[Sequence[int]],
    *,
    last: int | None = None,
    cache_scales: CacheScales = (),
) -> Path:
    """Write a layer that is right for the ``last`` tokens of ``texts``, None for all.

    ``cache_scales``: of keys and values by served layer, where its cache is of e4m3.

    ``fc`` takes the hidden state after the last layer, and a little of the others. The MLP's last
    matrix is the least-squares map of its features to what the state of the next token lacks.
    """
    first = 0 if last is None else -last
    vocabulary = _vocabulary(served, {token for text in texts for token in text[first:]})
    config, weights = _made(served, vocabulary, {})
    size, tensors = config["hidden_size"], load_file(served / "model.safetensors")
    tables = {"embed": tensors["model.embed_tokens.weight"].float()}
    weights["fc.weight"] *= 0.01
    weights["fc.weight"][:, -size:] += torch.eye(size)
    weights["norm.weight"] = tensors["model.norm.weight"].float()
    head = tensors.get("lm_head.weight", tables["embed"]).float()
    weights["lm_head.weight"] = head[torch.tensor(vocabulary)].contiguous()
    layer, features, missing = Eagle3Layer(config, weights), list[Tensor](), list[Tensor]()
    for text, states in zip(texts, layer_states(served, texts, cache_scales), strict=True):
        ids = config["eagle_aux_hidden_state_layer_ids"]
        hidden = layer.combined(torch.cat([states[n].float() for n in ids], dim=-1))
        attended = layer.attended(tables["embed"][torch.tensor(text[1:])], hidden[:-1])
        features.append(layer.inner(attended)[first:])
        missing.append((hidden[1:] - attended)[first:])
    rows, wanted = torch.cat(features), torch.cat(missing)
    fitted = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution.T.contiguous()
    weights["midlayer.mlp.down_proj.weight"] = fitted
    return _write(folder, config, weights)


def layer_states(
    served: Path, texts: Sequence[Sequence[int]], cache_scales: CacheScales = ()
) -> list[list[Tensor]]:
    """Return transformers' hidden states [tokens, H] of each text: before each layer, and after
    the last one without the norm."""
    own = _process().submit(_layer_states, served, [list(text) for text in texts], cache_scales)
    states: list[list[Tensor]] = own.result()
    return states


def _layer_states(
    served: Path, texts: Sequence[Sequence[int]], cache_scales: CacheScales
) -> list[list[Tensor]]:
    model = load_over(served, cache_scales).base_model
    last = list[Tensor]()
    hook = model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0].clone()))
    found = []
    with torch.inference_mode():
        for text in texts:
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            found.append([*(state[0].clone() for state in states[:-1]), last.pop()])
    hook.remove()
    return found


def _vocabulary(served: Path, needed: set[int]) -> list[int]:
    """Return half of the served model's tokens, ``needed`` among them."""
    size = json.loads((served / "config.json").read_text())["vocab_size"]
    others = [token for token in (*range(0, size, 2), *range(1, size, 2)) if token not in needed]
    return sorted([*needed, *others[: size // 2 - len(needed)]])


def _made(
    served: Path, vocabulary: Sequence[int], fields: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and random weights of a layer with a vocabulary of its own."""
    found = json.loads((served / "config.json").read_text())
    names = "hidden_size vocab_size num_attention_heads num_key_value_heads head_dim"
    config = {name: found[name] for name in (*names.split(), "max_position_embeddings")}
    layers = found["num_hidden_layers"]
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"num_hidden_layers": 1, "intermediate_size": INNER, "tie_word_embeddings": False}
    config |= {"draft_vocab_size": len(vocabulary), "rms_norm_eps": EPS}
    config |= {"eagle_aux_hidden_state_layer_ids": [layers - 2, layers - 1, layers], **fields}
    size, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(6)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    layer = "midlayer"
    weights = {
        "fc.weight": drawn(size, 3 * found["hidden_size"]),
        f"{layer}.self_attn.q_proj.weight": drawn(heads * width, 2 * size),
        f"{layer}.self_attn.k_proj.weight": drawn(kv_heads * width, 2 * size),
        f"{layer}.self_attn.v_proj.weight": drawn(kv_heads * width, 2 * size),
        f"{layer}.self_attn.o_proj.weight": drawn(size, heads * width),
        f"{layer}.mlp.gate_proj.weight": drawn(INNER, size),
        f"{layer}.mlp.up_proj.weight": drawn(INNER, size),
        f"{layer}.mlp.down_proj.weight": drawn(size, INNER),
        "lm_head.weight": drawn(len(vocabulary), size),
        "d2t": torch.tensor([token - n for n, token in enumerate(vocabulary)]),
    }
    if size != found["hidden_size"]:
        weights["embed_tokens.weight"] = drawn(found["vocab_size"], size)
    norms = {"norm": size}
    norms |= {
        f"{layer}.{name}": size
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    if fields.get("norm_before_fc"):
        norms["input_norm"] = 3 * found["hidden_size"]
    for name, width in norms.items():
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
    return config, weights


def _write(folder: Path, config: Mapping[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------------------------ fitted drafts
FITTED = {"medusa": fitted_medusa, "eagle": fitted_eagle, "eagle3": fitted_eagle3}
RANDOM = {"medusa": random_medusa, "eagle": random_eagle, "eagle3": random_eagle3}
