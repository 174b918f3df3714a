"""Hostile code fails, is classified by evidence, and leaves nothing behind: as root and as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlock.executors.sandbox.supervisor import Sandbox
from tests.needs import missing
from tests.sandbox.attacks import ATTACKS, Attack
from tests.support.sandboxes import ORDINARY, ordinary_python, require
from tests.thorough import THOROUGH

HERE = Path(__file__).parent


@pytest.mark.proves("EXEC-03")
@pytest.mark.proves("EXEC-04")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
@pytest.mark.asyncio(loop_scope="session")
async def test_an_attack_fails(sandbox: Sandbox, attack: Attack) -> None:
    assert await attack.fault(sandbox) is None


# The tests above run the zygote as this process's user, and runsc needs root.
PLACES = [(0, "bubblewrap"), (0, "gvisor"), (ORDINARY, "zygote"), (ORDINARY, "bubblewrap")]


@pytest.mark.proves("EXEC-03")
@pytest.mark.parametrize(
    "place", PLACES, ids=["root-bubblewrap", "root-gvisor", "ordinary-zygote", "ordinary-bubblewrap"]
)
def test_every_attack_fails_on_every_back_end_for_every_user(place: tuple[int, str]) -> None:
    """In the normal run each of the places takes its part of the attacks; in a thorough one it takes all of them."""
    user, backend = place
    part = (0, 1) if THOROUGH else (PLACES.index(place), len(PLACES))
    require(backend)
    if os.getuid() != 0 and user != os.getuid():
        missing("only root can become another user: run the tests as root")
    done = subprocess.run(
        [ordinary_python(user), "-I", str(HERE / "siege.py"), backend, *map(str, part), *sys.path],
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
        env={"SECRET_TOKEN": "hunter2", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "every attack failed\n", "")
