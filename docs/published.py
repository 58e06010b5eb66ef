"""Run `rbln-serve check` on published models; write docs/published.json and docs/models.md.

    python docs/published.py            # all of docs/published_configs.json, a few minutes
    python docs/published.py Qwen/Qwen3-8B ...
    python docs/published.py --check    # writes nothing; 1 if a result differs from the stored one

Each `config.json` has what its model's public page says and matters here. There are no weights, and
the tokenizer is the tests' own, of which the verdict knows no more than that it loads. What would
differ from host to host (memory, what is stored) is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import generate
from saved_tables import DOCS, PUBLISHED, load_published

from rbln_backend.settings import child_environ
from tests.checkpoint_tokenizer import tokenizer_files, train_tokenizer
from tests.warm_process import WarmProcess

CONFIGS = DOCS / "published_configs.json"
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "rbln"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, write and print the differences; return 1 for differences with `--check`."""
    models = json.loads(CONFIGS.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    names = args.models or list(models)
    if unknown := [name for name in names if name not in models]:
        parser.error(f"not in {CONFIGS.name}: {', '.join(unknown)}")
    verdicts = load_published()
    found = ask({name: models[name] for name in names})
    changed = [name for name in found if found[name] != verdicts.get(name)]
    for name in changed:
        sys.stdout.write(f"{name}: {found[name].get('reason') or 'can run'}\n")
    if args.check:
        return 1 if changed else 0
    merged = {name: (verdicts | found)[name] for name in models if name in verdicts | found}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(merged[name])}" for name in merged)
    PUBLISHED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return generate.main([])


def ask(models: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the result of each model in its stored form."""
    with tempfile.TemporaryDirectory(prefix="rbln-published-") as root:
        environ = child_environ(settings=False, **_QUIET, VLLM_CACHE_ROOT=root)
        with closing(WarmProcess(environ)) as cli:
            return {
                name: _verdict(cli, environ, Path(root) / f"model-{number}", model)
                for number, (name, model) in enumerate(models.items())
            }


def _verdict(
    cli: WarmProcess, environ: Mapping[str, str], folder: Path, model: Mapping[str, Any]
) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model["config"]), encoding="utf-8")
    for name, content in tokenizer_files(train_tokenizer(), 4096).items():
        (folder / name).write_bytes(content)
    done = cli.run("check", str(folder), "--json", *model.get("flags", ()), environ=environ)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{done.args} ended with {done.returncode}:\n{done.stderr}") from None
    verdict = {"architecture": model["config"]["architectures"][0]}
    verdict["flags"] = " ".join(model.get("flags", ()))
    if "num_parameters" not in answer:
        return {**verdict, "reason": answer["reason"].replace(str(folder), "MODEL")}
    groups = answer["kv_groups"]
    return {
        **verdict,
        "task": answer["task"],
        "dtype": answer["dtype"],
        "weight_bytes": answer["weight_bytes"],
        "kv_caches": [f"{group['num_layers']} x {group['kind']}" for group in groups],
        "quantized_layers": answer["quantized_layers"],
    }


if __name__ == "__main__":
    sys.exit(main())
