"""The environment with the agent frameworks and the providers' libraries, on top of the one that the tests run in."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from tests.support.mcp_servers.real import (
    ROOT,
    install_once,
    install_python,
    make_environment,
)

LOCK = ROOT / "requirements" / "integrations.txt"


def libraries_python() -> str:
    """The interpreter of the environment. It also has what the tests have, Interlock included, except where the lock
    names another version: only what is missing is installed, which takes some seconds, once.
    """
    folder = ROOT / ".venv-integrations"
    install_once(folder, (LOCK,), _install)
    return str(folder / "bin" / "python")


def _install(folder: Path) -> None:
    make_environment(folder)
    below = sysconfig.get_path("purelib")
    packages = folder / os.path.relpath(below, sys.prefix)
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    install_python(folder, LOCK)
