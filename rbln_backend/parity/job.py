"""Jobs and results of the runners, exchanged as files between processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

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
        """Write one file atomically."""
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
