"""Install pip into a virtual environment without pip: `fetch_pip.py VENV REQUIREMENTS`.

Debian's python3.11 has no ensurepip; it is part of python3.11-venv, which only root can install.
REQUIREMENTS pins one wheel of pip by its SHA-256. The wheel comes from pip's own package index
($PIP_INDEX_URL, else the Python package index), and runs only with the pinned digest. Standard
library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

INDEX = "https://pypi.org/simple"


def read_pin(requirements: Path) -> tuple[str, str]:
    """Return pip's version and SHA-256 from ``requirements``."""
    pin = re.search(
        r"^pip==(\S+) --hash=sha256:(\w+)$", requirements.read_text("utf-8"), re.MULTILINE
    )
    if pin is None:
        raise SystemExit(f"fetch_pip.py: {requirements} pins no pip with a SHA-256")
    return pin[1], pin[2]


def download(index: str, version: str, digest: str) -> bytes:
    """Return pip's wheel from ``index``, a base URL of PEP 503.

    Exits if the index lacks it, or has another SHA-256.
    """
    page_url = f"{index.rstrip('/')}/pip/"
    with urllib.request.urlopen(page_url, timeout=60) as page:
        links = re.findall(r'href="([^"#]+)', page.read().decode())
    name = f"pip-{version}-py3-none-any.whl"
    link = next((link for link in links if link.endswith(f"/{name}") or link == name), None)
    if link is None:
        raise SystemExit(f"fetch_pip.py: {page_url} lists no {name}")
    with urllib.request.urlopen(urljoin(page_url, link), timeout=180) as file:
        wheel: bytes = file.read()
    if (found := hashlib.sha256(wheel).hexdigest()) != digest:
        raise SystemExit(f"fetch_pip.py: {name} has the SHA-256 {found}, expected {digest}")
    return wheel


def main(venv: Path, requirements: Path) -> None:
    """Download, verify and install pip."""
    version, digest = read_pin(requirements)
    wheel = download(os.environ.get("PIP_INDEX_URL", INDEX), version, digest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"pip-{version}-py3-none-any.whl"
        path.write_bytes(wheel)
        # Python can run pip from its wheel.
        command = [str(venv / "bin" / "python"), str(path / "pip"), "install", "--quiet"]
        subprocess.run([*command, "--no-index", "--no-deps", str(path)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
