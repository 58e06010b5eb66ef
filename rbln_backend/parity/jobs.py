"""Jobs and results of the sides, which are exchanged as files, and jobs from the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rbln_backend.errors import ConfigError
from rbln_backend.parity.options import HUB_NAMES, Options
from rbln_backend.settings import child_environ

Side = Literal["cpu", "rbln", "transformers"]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work of one side: generate freely, then follow ``forced`` tokens where they differ."""

    side: Side
    model: str
    engine_args: dict[str, Any]
    prompts: tuple[str, ...]
    max_tokens: int
    num_logprobs: int
    """Log-probabilities per position; -1 for the whole vocabulary, 0 for none."""
    lora: str | None = None
    forced: tuple[tuple[int, ...], ...] | None = None
    """The reference's tokens by prompt; None to only generate freely."""
    probe: tuple[tuple[int, ...], int] | None = None
    """Token ids whose hidden states are recorded after every layer, and the number of last ones
    that go through the decode graph one by one."""
    num_hidden_layers: int | None = None
    """Number of the model's first layers to run; None for all."""
    profile_dir: str | None = None

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    def write(self, path: Path) -> None:
        path.write_bytes(self.encoded())

    @classmethod
    def read(cls, path: Path) -> Job:
        return msgspec.json.decode(path.read_bytes(), type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one prompt. T: generated tokens, N: tokens with a log-probability."""

    prompt_ids: IntArray
    """[tokens of the prompt]."""
    token_ids: IntArray
    """[T], the side's own greedy choice."""
    text: str
    top_ids: IntArray
    """[T, N]: the likeliest tokens after the reference's tokens, likeliest first."""
    logprobs: FloatArray
    """[T, N]: their log-probabilities, natural logarithm."""

    def ranking(self, count: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens of the first position with their log-probabilities."""
        return list(
            zip(self.top_ids[0][:count].tolist(), self.logprobs[0][:count].tolist(), strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Hidden states after every decoder layer, the residual included."""

    names: tuple[str, ...]
    states: FloatArray
    """[layers, rows, hidden size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """All answers of a side, in the order of the prompts."""

    answers: tuple[Answer, ...]
    seconds: float
    """Seconds of generation, without loading or compiling."""
    layers: Layers | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Versions, device, dtype: for the report."""

    def write(self, path: Path) -> None:
        arrays: dict[str, Any] = {}
        for index, answer in enumerate(self.answers):
            for name in ("prompt_ids", "token_ids", "top_ids", "logprobs"):
                arrays[f"{name}.{index}"] = getattr(answer, name)
        if self.layers is not None:
            arrays["layers"] = self.layers.states
        words = {
            "texts": [answer.text for answer in self.answers],
            "seconds": self.seconds,
            "about": self.about,
            "layer_names": None if self.layers is None else self.layers.names,
        }
        arrays["words"] = np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
        temporary = path.with_suffix(".writing.npz")
        np.savez_compressed(temporary, **arrays)
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> SideResult:
        with np.load(path, allow_pickle=False) as file:
            words = json.loads(bytes(file["words"]))
            answers = tuple(
                Answer(
                    text=text,
                    prompt_ids=file[f"prompt_ids.{index}"],
                    token_ids=file[f"token_ids.{index}"],
                    top_ids=file[f"top_ids.{index}"],
                    logprobs=file[f"logprobs.{index}"],
                )
                for index, text in enumerate(words["texts"])
            )
            names = words["layer_names"]
            layers = None if names is None else Layers(names=tuple(names), states=file["layers"])
        return cls(answers=answers, seconds=words["seconds"], layers=layers, about=words["about"])


# Weights, configuration, code, and a tokenizer's files.
_FILES = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja"]


def checkpoint_folder(model: str) -> Path | None:
    """Return the folder with ``config.json`` of a path or a name of the hub.

    For a name it is the snapshot's folder, named by the commit; only that file is checked at the
    hub. None without such a file: the runners then report the error.
    """
    if Path(model).is_dir():
        return Path(model)
    # Local import: it takes half a second, and a path does not need it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except (OSError, ValueError):
        return None


def downloaded_folder(model: str) -> Path:
    """Return the folder with all files of a checkpoint; missing files of a name are downloaded.

    Raises what the hub's library raises.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=_FILES))


# GiB of KV cache on vLLM's CPU backend; by default it takes half of the memory.
_CPU_KV_GIB = "4"
_PROBE_WORKER = "rbln_backend.parity.probe_worker.ProbeWorker"
# No layer of a model needs a longer block than the context; vLLM wants it a multiple of this.
_BLOCK_UNIT = 128
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


class Jobs:
    """Factory of the sides' jobs from one set of options. Raises ``ConfigError``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.model = HUB_NAMES.get(options.model, options.model)
        """Path or hub name, also for a short name on the command line."""
        self.clamped: list[str] = []
        """Messages on values that differ from the command line."""
        self._config = _read_config(self.model)
        is_mixture = any(int(self._config.get(name) or 0) > 1 for name in _EXPERT_FIELDS)
        if options.ep and self._config and not is_mixture:
            raise ConfigError(f"--ep needs a mixture of experts; {options.model} has none")
        self._max_model_len = self._at_most(
            "--max-model-len",
            options.max_model_len,
            self._config.get("max_position_embeddings"),
            "the model's context",
        )
        self._block_size_rbln = self._at_most(
            "--block-size-rbln",
            options.block_size_rbln,
            -(-self._max_model_len // _BLOCK_UNIT) * _BLOCK_UNIT,
            "the longest request",
        )
        self._num_logprobs = self._at_most(
            "--logprobs", options.logprobs, options.max_logprobs_cap, "--max-logprobs-cap"
        )
        self._num_logprobs = self._at_most(
            "--logprobs", self._num_logprobs, self._config.get("vocab_size"), "the vocabulary"
        )

    def _at_most(self, flag: str, value: int, limit: int | None, of: str) -> int:
        if limit is None or value <= limit:
            return value
        self.clamped.append(f"{flag} {value} is more than {of}, {limit}, which is used instead")
        return limit

    def generate(self, side: Side, forced: Sequence[Sequence[int]] | None = None) -> Job:
        """Return the job over all prompts, with ``forced`` tokens to follow."""
        options, profile_dir = self._options, None
        if options.profile:
            profile_dir = str(Path("profile").absolute() / f"{side}_{Path(options.model).name}")
        return Job(
            side=side,
            model=self.model,
            engine_args=self._engine_args(side, batch=options.batch),
            prompts=options.prompts,
            max_tokens=options.max_tokens,
            num_logprobs=self._num_logprobs,
            lora=options.lora,
            forced=None if forced is None else tuple(tuple(tokens) for tokens in forced),
            num_hidden_layers=options.num_hidden_layers,
            profile_dir=profile_dir,
        )

    def probe(self, side: Side, prompt: str, token_ids: Sequence[int], num_decoded: int) -> Job:
        """Return the job for hidden states over ``token_ids``, whose last ones are decoded."""
        args = self._engine_args(side, batch=1)
        if side == "rbln":
            args.setdefault("worker_cls", _PROBE_WORKER)
        return dataclasses.replace(
            self.generate(side),
            engine_args=args,
            prompts=(prompt,),
            max_tokens=1,
            num_logprobs=0,
            probe=(tuple(token_ids), num_decoded),
            profile_dir=None,
        )

    def _engine_args(self, side: Side, *, batch: int) -> dict[str, Any]:
        options = self._options
        args: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
        if side == "transformers":
            return args
        args |= {
            "max_num_seqs": batch,
            "max_num_batched_tokens": options.max_batched,
            "max_model_len": self._max_model_len,
            "max_logprobs": -1,
            # A hit would make a forced run skip computation.
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "dtype": options.dtype,
        }
        if options.lora is not None:
            args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 64}
        if side == "cpu":
            return args | {
                "enforce_eager": True,
                "async_scheduling": False,
                "block_size": options.block_size_cpu,
            }
        ranks = {
            "block_size": self._block_size_rbln,
            "tensor_parallel_size": options.tp,
            "pipeline_parallel_size": options.pp,
            "data_parallel_size": options.dp,
            "enable_expert_parallel": options.ep,
        }
        return args | ranks | options.rbln_args


def _read_config(model: str) -> Mapping[str, Any]:
    """Return the text part of the checkpoint's config.json; empty if it has none."""
    folder = checkpoint_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config | (config.get("text_config") or {})


def get_environ(side: Side) -> Mapping[str, str]:
    """Return the environment of a side: this process's without vLLM's settings, plus the side's.

    Plug-ins and compile cache are as documented, so that no stored graph is compared. No kernel
    mode is set: the RBLN side runs the ops that serving runs.
    """
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if side == "rbln":
        return child_environ(settings=True, VLLM_DISABLE_COMPILE_CACHE="1", **quiet)
    return child_environ(
        settings=False, VLLM_PLUGINS="cpu", VLLM_CPU_KVCACHE_SPACE=_CPU_KV_GIB, **quiet
    )
