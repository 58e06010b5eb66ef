"""Runner of the benchmarks: ``python -m benchmarks NAME [OPTION ...]``."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "agents": "over_http.agents",
    "bucket_changes": "over_http.bucket_changes",
    "bursts": "over_http.bursts",
    "compare": "compare.compare",
    "connections": "over_http.connections",
    "decode": "in_process.decode",
    "experts": "in_process.experts",
    "http_processes": "over_http.http_processes",
    "kernels": "in_process.kernels",
    "kv_routing": "over_http.kv_routing",
    "metrics_cost": "metrics.cost",
    "padding": "over_http.padding",
    "peers": "engines.peers",
    "prefix": "in_process.prefix",
    "prompts_at_once": "in_process.prompts_at_once",
    "quantized": "compare.quantized",
    "sampler": "in_process.sampler",
    "scenarios": "scenarios.command",
    "schemas": "schemas.command",
    "same_file": "compare.same_file",
    "several_models": "over_http.several_models",
    "speculation": "over_http.speculation",
    "step_profile": "in_process.step_profile",
    "storm": "over_http.storm",
    "tenants": "over_http.tenants",
    "world_size": "in_process.world_size",
}


def main(words: list[str]) -> int:
    """Run the benchmark that the first word names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=COMMANDS)
    name = parser.parse_args(words[:1]).name
    module = importlib.import_module(f"benchmarks.{COMMANDS[name]}")
    return int(module.main(words[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
