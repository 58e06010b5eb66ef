"""llama.cpp's ``llama_decode`` in its own process, behind engine_worker's protocol.

``python -m benchmarks llama_worker '{"gguf": FILE, "threads": 2, "max_sequences": 8,
"max_length": 1024}'`` in the peers' environment. Several prompts are decoded together, as the
sequences of one batch; prompts are given in batches of at most 512 tokens, llama.cpp's default. The
next token is chosen by numpy between the steps, outside their times: that flatters llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.engines.worker_protocol import answers_to_parent, timed_answer

_BATCH_TOKENS = 512


class _Engine:
    """One model and one context."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            settings["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings["max_sequences"] * settings["max_length"]
        params.n_seq_max = settings["max_sequences"]
        params.n_batch = params.n_ubatch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = settings["threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def forget(self) -> None:
        """Empty the KV cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> float:
        """Decode rows of (sequence, position, token, True to compute logits); return the seconds.

        Raises RuntimeError if llama.cpp returns an error.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        started = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        seconds = time.perf_counter() - started
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(rows)} tokens")
        return seconds

    def best(self, row: int) -> int:
        """Return the likeliest token after row `row` of the last batch."""
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocab_size,)).argmax())

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer one command; its clock runs during decodes only."""
        prompts = command["prompts"]
        self.forget()
        events = self._prefill(prompts)
        tokens = [[token] for _, given in events for token in given.values()]
        sequences = range(len(prompts))
        clock = events[-1][0]
        times = [(time, list(given)) for time, given in events]
        for position in range(1, command["output_tokens"]):
            if clock > command["budget_seconds"]:
                break
            rows = [
                (sequence, len(prompts[sequence]) + position - 1, tokens[sequence][-1], True)
                for sequence in sequences
            ]
            clock += self.run(rows)
            times.append((clock, list(sequences)))
            for sequence in sequences:
                tokens[sequence].append(self.best(sequence))
        return timed_answer(times, tokens)

    def _prefill(self, prompts: list[list[int]]) -> list[tuple[float, dict[int, int]]]:
        """Return, by batch, the time at its end and the first tokens of the prompts it ended."""
        rows = [
            (sequence, position, token, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        events = []
        clock = 0.0
        for begin in range(0, len(rows), _BATCH_TOKENS):
            part = rows[begin : begin + _BATCH_TOKENS]
            clock += self.run(part)
            ended = {row[0]: self.best(i) for i, row in enumerate(part) if row[3]}
            events.append((clock, ended))
        return events


def main() -> None:
    """Load the model that the first argument names and serve commands until end of input."""
    with answers_to_parent() as answers:
        settings = json.loads(sys.argv[1])
        started = time.perf_counter()
        engine = _Engine(settings)
        answers.send(
            {
                "platform": "llama.cpp",
                "version": llama_cpp.__version__,
                "system": llama_cpp.llama_print_system_info().decode(),
                "threads": settings["threads"],
                "startup_seconds": time.perf_counter() - started,
            }
        )
        for command in answers.commands():
            answers.send(engine.generate(command))


if __name__ == "__main__":
    main()
