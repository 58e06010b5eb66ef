"""Programs of Debian packages that some tests run: deploy/scripts/install_test_tools.sh."""

from __future__ import annotations

import os
import shutil

import pytest


def debian_tool(name: str) -> str:
    """Return the path of the program ``name``.

    Skips the calling test where the program is missing and `make test` cannot install it: for a
    user other than root, or without apt-get. Fails the test everywhere else, so that CI, which
    runs as root, skips nothing.
    """
    # Debian installs nginx where only root's PATH looks.
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if found:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        pytest.fail(f"{name} is not installed: run deploy/scripts/install_test_tools.sh")
    pytest.skip(f"{name} is not installed: as root, run deploy/scripts/install_test_tools.sh")
