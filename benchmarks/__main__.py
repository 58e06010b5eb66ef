"""Runner of the benchmarks: ``python -m benchmarks NAME [OPTION ...]``."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "compare": "compare.compare",
    "kernels": "in_process.kernels",
    "peers": "engines.peers",
    "quantized": "compare.quantized",
    "scenarios": "scenarios.command",
    "schemas": "schemas.command",
    "step_profile": "in_process.step_profile",
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
