"""The generated pages say what the code says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generate(script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *flags],
        cwd=DOCS.parent,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SOURCES = (
    *("fields_page.py", "models_page.py", "observability_page.py", "models.json"),
    *("published_page.py", "published.json", "security.md", "http_api.md", "upstream_page.py"),
    *("results_page.py", "errors_page.py", "routes_page.py"),
)
PAGES = [
    *("configuration.md", "metrics.md", "models.md", "observability.md", "server_info.md"),
    *("results.md", "vllm_serve.md"),
]


@pytest.mark.parametrize("page", PAGES)
def test_a_stale_page_is_noticed_and_rewritten(tmp_path: Path, page: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    # Alerts and results are read from beside the pages' folder.
    shutil.copytree(DOCS.parent / "deploy" / "prometheus", tmp_path / "deploy" / "prometheus")
    (tmp_path / "benchmarks").symlink_to(DOCS.parent / "benchmarks")
    shutil.copy(DOCS.parent / "README.md", tmp_path)
    script = Path(shutil.copy(DOCS / "generate.py", docs))
    for name in (*SOURCES, *PAGES):
        shutil.copy(DOCS / name, docs)
    (docs / page).write_text("edited by hand")
    check = generate(script, "--check")
    assert (check.returncode, check.stdout) == (1, f"{page}: stale, run `make docs`\n")
    assert (docs / page).read_text() == "edited by hand"
    assert generate(script).stdout == f"{page}: written\n"
    assert (docs / page).read_text() == (DOCS / page).read_text()
