"""Checkpoints with an MTP layer, which is right some of the time, or never, and its reference."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoint_families import LAYERS, SIZES
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.reference import _process, load_over

CacheScales = tuple[tuple[float, float], ...]

_HIDDEN_SIZE = int(SIZES["hidden_size"])
_SMALL = 0.02
"""Share of attention and experts in a fitted layer."""
_ADDED = re.compile(r"(o|down)_proj\.weight(_scale(_inv)?)?$")
"""Tensors that a fitted layer's attention and experts are proportional to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFamily:
    """The parts of one family's MTP layer."""

    served: str
    """Of ``FAMILIES``."""
    block: str
    """The family of whose layers the transformer block is one."""
    block_fields: Mapping[str, Any] = field(default_factory=dict)
    prefix: str
    """Of the block's tensors."""
    token_norm: str
    hidden_norm: str
    projection: str
    last_norm: str | None
    token_first: bool = True
    """The projection reads the token before the hidden state."""
    recycles_norm: bool = False
    """The next token is drafted from the hidden state after the last norm."""
    reads_before_norm: bool = False
    """The served model's hidden states are those before its last norm."""
    architecture: str | None = None
    """Of the served model, where transformers has no class for it."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the served model by the names that the layer has for them."""


def _deepseek(served: str, **options: Any) -> MtpFamily:
    own = f"model.layers.{LAYERS}."
    return MtpFamily(
        served=served,
        block=served,
        block_fields={"first_k_dense_replace": 0},
        prefix=own,
        token_norm=f"{own}enorm",
        hidden_norm=f"{own}hnorm",
        projection=f"{own}eh_proj",
        last_norm=f"{own}shared_head.norm",
        copies={
            f"{own}embed_tokens.weight": "model.embed_tokens.weight",
            f"{own}shared_head.head.weight": "lm_head.weight",
        },
        **options,
    )


_ERNIE_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
MTP_LAYERS: Mapping[str, MtpFamily] = {
    "glm4_moe": _deepseek("glm4_moe"),
    "deepseek_v3": _deepseek("deepseek_v3", recycles_norm=True),
    "mimo": MtpFamily(
        served="qwen2",
        block="qwen2",
        prefix="model.mtp_layers.0.",
        token_norm="model.mtp_layers.0.token_layernorm",
        hidden_norm="model.mtp_layers.0.hidden_layernorm",
        projection="model.mtp_layers.0.input_proj",
        last_norm="model.mtp_layers.0.final_layernorm",
        token_first=False,
        recycles_norm=True,
        reads_before_norm=True,
        architecture="MiMoForCausalLM",
    ),
    "ernie4_5_moe": MtpFamily(
        served="ernie4_5_moe",
        block="llama",
        block_fields={"rope_parameters": _ERNIE_ROPE, "rms_norm_eps": 1e-5},
        prefix="model.mtp_block.0.",
        token_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        projection="model.mtp_linear_proj.0",
        last_norm=None,
    ),
}
"""By the name of the served family."""


class MtpMaker:
    """Writes checkpoints of one family with an MTP layer."""

    def __init__(
        self, name: str, make: Callable[..., Path], *, cache_scales: CacheScales = (), **fields: Any
    ) -> None:
        """``make``: returns the checkpoint of a family with ``fields``; a quantised one has a
        float32 copy of its values in the folder ``plain``. ``fields``: of the served model and of
        the layer. ``cache_scales``: of keys and values in a cache of e4m3 by layer, the MTP layer
        last; none in another.
        """
        self.family = family = MTP_LAYERS[name]
        self._scales = cache_scales
        self.stored = make(family.served, **fields)
        """Without the layer."""
        self.served = _plain(self.stored)
        """The same values; a checkpoint of transformers."""
        own = {"num_hidden_layers": 1, "seed": 9, **family.block_fields, **fields}
        self._block = make(family.block, **own)

    def random(self, folder: Path) -> Path:
        """Write a layer of random weights, whose drafts are wrong."""
        return self._write(folder, self._drawn())

    def fitted(
        self, folder: Path, texts: Sequence[Sequence[int]], *, last: int | None = None
    ) -> Path:
        """Write a layer that is fitted to the ``last`` tokens of ``texts``.

        Its projection is the least-squares map of a token and the hidden state before it to the
        token's own hidden state. Attention and MLP add a little to that.
        """
        family, first = self.family, 0 if last is None else -last
        tensors = self._drawn()
        for name, tensor in tensors.items():
            if _ADDED.search(name) and tensor.dtype.itemsize > 1:
                tensors[name] = tensor * _SMALL
            elif name.startswith((family.token_norm, family.hidden_norm)):
                tensors[name] = torch.ones_like(tensor)
        arguments = self.served, [list(text) for text in texts], self._scales
        states = _process().submit(_states, *arguments).result()
        embedding = load_file(self.served / "model.safetensors")["model.embed_tokens.weight"]
        pairs, wanted = [], []
        for text, (before, after) in zip(texts, states, strict=True):
            rows = embedding[torch.tensor(text[1:])].float()
            hidden = before if family.reads_before_norm else after
            own = [_norm(rows), _norm(hidden[:-1])]
            pairs.append(torch.cat(own if family.token_first else own[::-1], dim=-1)[first:])
            # What the LM head reads is the layer's last norm of the wanted state, if it has one.
            wanted.append((before if family.last_norm else after)[1:][first:])
        solved = torch.linalg.lstsq(torch.cat(pairs), torch.cat(wanted), driver="gelsd").solution
        tensors[f"{family.projection}.weight"] = solved.T.contiguous()
        if family.last_norm:
            weight = load_file(self.served / "model.safetensors")["model.norm.weight"]
            tensors[f"{family.last_norm}.weight"] = weight.clone()
        return self._write(folder, tensors)

    def drafts(self, own: Path, text: Sequence[int], count: int) -> list[int]:
        """Return transformers' ``count`` drafts after ``text`` by the random layer in ``own``.

        The last token of ``text`` has no hidden state.
        """
        arguments = self.family, self.served, _plain(self._block), own, list(text), count
        return _process().submit(_drafts, *arguments, self._scales).result()

    def _drawn(self) -> dict[str, Tensor]:
        family, generator = self.family, torch.Generator().manual_seed(5)
        prefix = "model.layers.0."
        own = {
            family.prefix + name.removeprefix(prefix): tensor
            for name, tensor in load_file(self._block / "model.safetensors").items()
            if name.startswith(prefix)
        }
        for norm in (family.token_norm, family.hidden_norm, family.last_norm):
            if norm:
                noise = torch.randn(_HIDDEN_SIZE, generator=generator)
                own[f"{norm}.weight"] = 1 + 0.2 * noise
        both = torch.randn(_HIDDEN_SIZE, 2 * _HIDDEN_SIZE, generator=generator)
        own[f"{family.projection}.weight"] = both * (2 * _HIDDEN_SIZE) ** -0.5
        return own

    def _write(self, folder: Path, tensors: dict[str, Tensor]) -> Path:
        ignored = shutil.ignore_patterns("plain")
        shutil.copytree(self.stored, folder, dirs_exist_ok=True, ignore=ignored)
        served = load_file(self.served / "model.safetensors")
        copies = {name: served[own].clone() for name, own in self.family.copies.items()}
        save_file(tensors | copies | self._scale_tensors(), folder / "mtp.safetensors")
        place = folder / "config.json"
        config = json.loads(place.read_text()) | {"num_nextn_predict_layers": 1}
        if self.family.architecture:
            config["architectures"] = [self.family.architecture]
        place.write_text(json.dumps(config))
        return folder

    def _scale_tensors(self) -> dict[str, Tensor]:
        """Return the scales under the names of published FP8 checkpoints."""
        layers = [f"model.layers.{n}." for n in range(len(self._scales) - 1)]
        return {
            f"{prefix}self_attn.{name}_scale": torch.tensor(scale)
            for prefix, pair in zip([*layers, self.family.prefix], self._scales, strict=False)
            for name, scale in zip("kv", pair, strict=True)
        }


def quantized_maker(name: str, folder: Path, recipe: Recipe, **fields: Any) -> MtpMaker:
    """Return a maker of checkpoints that are quantised by ``recipe``, MTP layer and all."""

    def make(arch: str, **own: Any) -> Path:
        place = folder / ("layer" if "seed" in own else "served")
        return make_quantized_checkpoint(arch, place, recipe, **own)

    return MtpMaker(name, make, **fields)


def _plain(checkpoint: Path) -> Path:
    """Return the checkpoint of the same values that transformers reads."""
    copy = checkpoint / "plain"
    return copy if copy.is_dir() else checkpoint


def _states(
    served: Path, texts: Sequence[Sequence[int]], scales: CacheScales
) -> list[tuple[Tensor, Tensor]]:
    """Return the hidden states [tokens, H] of each text, before and after the last norm."""
    model, found = load_over(served, scales).base_model, list[Tensor]()
    hook = model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
    with torch.inference_mode():
        after = [model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    hook.remove()
    return [(own[0].clone(), own[1].clone()) for own in zip(found, after, strict=True)]


def _drafts(
    family: MtpFamily,
    served: Path,
    block: Path,
    own: Path,
    text: list[int],
    count: int,
    scales: CacheScales,
) -> list[int]:
    model = load_over(served, scales)
    eps, weights = float(model.config.rms_norm_eps), load_file(own / "mtp.safetensors")
    ((before, after),) = _states(served, [text[:-1]], scales)
    layer = load_over(block, scales[-1:]).base_model
    layer.norm = nn.Identity()
    hidden, tokens = before if family.reads_before_norm else after, text[1:]
    embedding = model.get_input_embeddings().weight.detach()
    drafts: list[int] = []
    for _ in range(count):
        rows = embedding[torch.tensor(tokens)]
        rows[0] = 0
        pair = [
            _norm(rows, weights[f"{family.token_norm}.weight"], eps),
            _norm(hidden, weights[f"{family.hidden_norm}.weight"], eps),
        ]
        joined = torch.cat(pair if family.token_first else pair[::-1], dim=-1)
        with torch.inference_mode():
            inputs = joined @ weights[f"{family.projection}.weight"].T
            out = layer(inputs_embeds=inputs[None]).last_hidden_state[0]
            last = out
            if family.last_norm:
                last = _norm(out, weights[f"{family.last_norm}.weight"], eps)
            drafts.append(int((model.get_output_embeddings()(last[-1])).argmax()))
        tokens = [*tokens, drafts[-1]]
        hidden = torch.cat((hidden, (last if family.recycles_norm else out)[-1:].clone()))
    return drafts


def _norm(rows: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return nn.functional.rms_norm(rows.float(), rows.shape[-1:], weight, eps)
