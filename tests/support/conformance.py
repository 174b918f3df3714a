"""Programs of the MCP conformance suite."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.mcp_servers.real import CACHE, install_once, node_binary, run_command

SUITE = Path(__file__).parents[1] / "doors" / "conformance"


def _install_suite(folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SUITE / name, folder / name)
    node = node_binary()
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    path = f"{node.parent}{os.pathsep}{os.environ['PATH']}"
    run_command([str(node), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder, {"PATH": path})


def program(package: str, entry: str) -> list[str]:
    """The command of a program of the suite's lock."""
    folder = CACHE / "conformance"
    install_once(folder, (SUITE / "package.json", SUITE / "package-lock.json"), _install_suite)
    return [str(node_binary()), str(folder / "node_modules" / package / entry)]
