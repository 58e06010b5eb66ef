"""How the SDK is called, as lines that two callers can be compared by.

``python -m tests.vendor.call_form [RUN ...]`` runs the vendor's wheels and writes their part of
``call_form.json`` again.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.sdk_double.launch import read_log

KEPT = Path(__file__).with_name("call_form.json")

# Of these the value differs from machine to machine; that it is there is the fact.
_ANY_VALUE = {"RBLN_NUM_THREADS", "RBLN_LOCAL_IP", "RBLN_ROOT_IP", "RCCL_PORT_GEN"}


def call_form(log: Path) -> list[str]:
    """The facts of a log: sorted, each said once, without sizes, names and counts."""
    lines = read_log(log)
    makers = {
        "context": _context,
        "mark_static_address": _static,
        "compile": _compile,
        "environment": _environment,
        "copy_kv": _copy,
        "mega_cache": _mega_cache,
    }
    found = {fact for line in lines for fact in makers.get(line["call"], _nothing)(line)}
    return sorted(found)


def _nothing(line: Mapping[str, Any]) -> Iterator[str]:
    return iter(())


def _context(line: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"context use_weight_sharing={line['use_weight_sharing']}"
        f" use_global_ctx={line['use_global_ctx']}"
    )


def _static(line: Mapping[str, Any]) -> Iterator[str]:
    yield f"static {line['device']} {line['dtype'].removeprefix('torch.')} {len(line['shape'])}d"


def _compile(line: Mapping[str, Any]) -> Iterator[str]:
    phase = phase_of(line)
    for key, value in line["options"].items():
        yield f"option {phase} {key}={_option(key, value)}"
    for given in line["inputs"]:
        rank = f" {len(given['shape'])}d" if "shape" in given else ""
        where = given.get("device", given.get("type"))
        yield f"input {phase} {given['kind']} on {where} {given.get('dtype', '')}{rank}".rstrip()
    for _ in line["attributes"]:
        yield f"attribute {phase}"
    for name in line["ops"]:
        if name.startswith("_c10d_functional::"):
            yield f"collective {phase} {name.removeprefix('_c10d_functional::')}"
    for name, arguments in line["sdk_ops"]:
        shown = ", ".join(_argument(text) for text in arguments)
        yield f"op {name.removeprefix('rbln_custom_ops::')}({shown})"


def phase_of(compiled: Mapping[str, Any]) -> str:
    """What a compiled graph is for: ``prefill`` and ``decode`` have KV, ``sampler`` has none."""
    names = [name for name, _ in compiled["sdk_ops"]]
    attention = [name for name in names if "attention" in name or "_causal_mla_" in name]
    if not attention:
        return "sampler" if names else "head"
    kinds = [name for name in attention if name.endswith(("prefill", "decode"))]
    if kinds:
        return "prefill" if kinds[0].endswith("prefill") else "decode"
    # The window op of CR13 is one for both: a table of one request has one axis.
    (tables,) = {arguments[6] for name, arguments in compiled["sdk_ops"] if name in attention}
    return "prefill" if tables.endswith("1d") else "decode"


def _option(key: str, value: Any) -> str:
    if key == "cache_dir":
        return "path"
    if key == "process_group_dict":
        return "ranks of groups " + str(sorted({tuple(ranks) for ranks in value.values()}))
    return str(value)


def _argument(text: str) -> str:
    """Sizes are the model's; a number says only that it is one."""
    return re.sub(r"^-?\d+$", "int", text)


def _environment(line: Mapping[str, Any]) -> Iterator[str]:
    if line["when"] != "open":
        return
    rank = line["variables"].get("LOCAL_RANK", "none")
    for name, value in line["variables"].items():
        yield f"environment of rank {rank}: {name}={'any' if name in _ANY_VALUE else value}"


def _copy(line: Mapping[str, Any]) -> Iterator[str]:
    yield "copy_kv by the runtime"


def _mega_cache(line: Mapping[str, Any]) -> Iterator[str]:
    yield f"mega_cache {line['action']}"


def kept_call_forms() -> dict[str, list[str]]:
    """The vendor's facts by name of the run, as they were last written."""
    forms: dict[str, list[str]] = json.loads(KEPT.read_text())
    return forms


def write(names: Iterable[str]) -> None:
    """Run the vendor's wheels once more for each of ``names``, and keep what they asked."""
    from tests.vendor.runs import RUNS, run_vendor

    forms = kept_call_forms() if KEPT.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            answered = run_vendor(RUNS[name], Path(folder))
            forms[name] = call_form(answered.log_path)
    lines = (f" {json.dumps(name)}: {json.dumps(forms[name])}" for name in sorted(forms))
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """All runs, or those that are named."""
    from tests.vendor.runs import RUNS

    write(sys.argv[1:] or RUNS)


if __name__ == "__main__":
    main()
