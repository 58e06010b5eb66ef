"""First tokens of prompts that are computed, in the prefix cache, and in files after a restart."""

from __future__ import annotations

import json
from functools import partial

from benchmarks.engines.server_process import ServerProcess
from benchmarks.runner.command import MAX_SAMPLES
from benchmarks.scenarios.bench import Bench, Values, firsts, prompts, send

MODELS = ("160m",)
SIDES = ("ours",)
MINUTES = 5
_LENGTH = 8192
_TOKENS = (300, 1000, 4000)


def run(bench: Bench) -> None:
    """Fill the figures. The folder is in the temporary one, and its files in the page cache."""
    for model in bench.models:
        tier = {"type": "fs", "root_dir": str(bench.folder / f"{model}-kv")}
        flags = (
            "--kv-transfer-config",
            json.dumps(
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"secondary_tiers": [tier]},
                }
            ),
        )
        for take in (_computed_and_kept, _from_files):
            with bench.serving(model, _LENGTH, *flags) as servers:
                for number, server in bench.each_round(servers):
                    for tokens in _TOKENS:
                        bench.measure(model, number, server, partial(take, server, tokens))


def _computed_and_kept(server: ServerProcess, tokens: int, seed: str) -> Values:
    """Measure a prompt twice, and store those of every attempt of this round after a restart."""
    for attempt in range(MAX_SAMPLES):
        _first(server, tokens, f"files {seed.split()[0]} {attempt}")
    own = f"computed {seed}"
    return {
        f"first token of {tokens:,}, computed": (_first(server, tokens, own), "s"),
        f"first token of {tokens:,}, in the prefix cache": (_first(server, tokens, own), "s"),
    }


def _from_files(server: ServerProcess, tokens: int, seed: str) -> Values:
    return {f"first token of {tokens:,}, in files": (_first(server, tokens, f"files {seed}"), "s")}


def _first(server: ServerProcess, tokens: int, seed: str) -> float:
    (prompt,) = prompts(f"{tokens} {seed}", 1, tokens)
    return firsts(send(server, [server.body(prompt, 1)])[1])[0]
