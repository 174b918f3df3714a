"""`./dev`: which packages each command installs, and what it shows meanwhile."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("dev", "pyproject.toml", "hatch_build.py", "requirements/run.txt", "requirements/dev.txt")
WALK = "src/interlock/data/_walk.c"
# Stands for the environment's Python: it writes down what pip is asked for, and says what pip says.
PYTHON = """#!/bin/sh
echo "$*" >> asked
case "$*" in *-r*) echo "Collecting alembic==1.20.1 (from -r requirements/run.txt (line 1))";; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*SOURCES, WALK):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", PYTHON), ("interlock", '#!/bin/sh\necho "interlock $*"\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return tmp_path


def dev(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["./dev", *words], cwd=checkout, capture_output=True, text=True, check=True, timeout=60)


def test_serving_installs_what_running_needs_and_shows_progress(checkout: Path) -> None:
    done = dev(checkout, "serve", "--port", "0")
    assert done.stdout == "interlock serve --port 0\n"
    packages, itself = (checkout / "asked").read_text().splitlines()
    assert "--require-hashes -r requirements/run.txt" in packages
    assert itself.endswith("-e .")
    assert "preparing .venv from requirements/run.txt" in done.stderr
    assert " packages, " in done.stderr
    assert "installing interlock itself, " in done.stderr
    assert "ready after" in done.stderr
    # It is prepared once, for every command of interlock.
    assert dev(checkout, "serve").stderr == ""
    assert dev(checkout, "interlock", "upstream", "list").stdout == "interlock upstream list\n"
    assert len((checkout / "asked").read_text().splitlines()) == 2


def test_on_a_terminal_the_package_that_is_installed_is_shown(checkout: Path) -> None:
    ours, theirs = pty.openpty()
    subprocess.run(["./dev", "serve"], cwd=checkout, stdout=subprocess.DEVNULL, stderr=theirs, check=True, timeout=60)
    shown = os.read(ours, 4096).decode()
    os.close(theirs)
    os.close(ours)
    assert "\r\x1b[K  1 of " in shown
    assert "s  alembic" in shown
    assert "installing interlock itself" in shown


def test_an_environment_for_development_serves_as_it_is(checkout: Path) -> None:
    words = ["cksum", "requirements/dev.txt", "pyproject.toml", "hatch_build.py", WALK]
    lock = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout
    (checkout / ".venv" / ".lock").write_text(lock)
    done = dev(checkout, "serve")
    assert (done.stdout, done.stderr) == ("interlock serve\n", "")
    assert not (checkout / "asked").exists()
