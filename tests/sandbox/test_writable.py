"""A directory of the host that a call may write to: it, nothing else, and nothing that is more than a plain file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.core.errors import Failure
from interlock.executors.sandbox.job import JobOutcome, Mount, PythonJob, Tier
from interlock.executors.sandbox.pool import Host
from interlock.executors.sandbox.supervisor import Sandbox
from tests.needs import missing
from tests.sandbox.writing import SOURCE, places
from tests.support.sandboxes import ORDINARY, ordinary_python, require

HERE = Path(__file__).parent
ON_SESSION = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.supports("EXEC-02", "EXEC-03")
@pytest.mark.parametrize(
    ("backend", "user"),
    [("zygote", 0), ("zygote", ORDINARY), ("bubblewrap", 0), ("bubblewrap", ORDINARY), ("gvisor", 0)],
)
def test_a_writable_directory_is_all_that_a_call_writes_to_on_every_back_end_for_every_user(
    backend: str, user: int
) -> None:
    require(backend)
    if os.getuid() != 0 and user != os.getuid():
        missing("only root can become another user: run the tests as root")
    done = subprocess.run(
        [ordinary_python(user), "-I", str(HERE / "writing.py"), backend, *sys.path],
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing went wrong\n", "")


@pytest.fixture
def place() -> Iterator[Path]:
    with places() as (writable, _):
        yield writable


def job(place: Path, tier: Tier = 1, entry: str = "writes") -> PythonJob:
    mounts = (Mount(place, str(place), writable=True),)
    return PythonJob(source=SOURCE, entry=entry, arguments={"d": str(place)}, tier=tier, mounts=mounts)


@ON_SESSION
async def test_a_call_with_a_network_writes_as_one_without(sandbox: Sandbox, place: Path) -> None:
    outcome = await sandbox.run(job(place, tier=2))
    assert outcome.status == "ok", outcome
    assert (place / "program").read_text() == "program\n"
    assert (await sandbox.run(job(place, tier=2, entry="reaches"))).value == []


@ON_SESSION
async def test_a_directory_that_is_not_there_is_not_made(sandbox: Sandbox, place: Path) -> None:
    outcome = await sandbox.run(job(place / "none"))
    assert (outcome.status, "not a directory" in outcome.why) == ("isolation", True)
    assert not (place / "none").exists()


@ON_SESSION
async def test_a_directory_of_another_user_is_refused_before_anything_runs(sandbox: Sandbox, place: Path) -> None:
    if os.getuid() != 0:
        missing("only root can give a directory away: run the tests as root")
    os.chown(place, ORDINARY, ORDINARY)
    outcome = await sandbox.run(job(place))
    assert (outcome.status, "does not belong to the server's user" in outcome.why) == ("isolation", True)


@ON_SESSION
async def test_modules_that_sandboxed_tools_run_from_are_never_writable(sandbox: Sandbox, place: Path) -> None:
    for directory in {one for path in Host().readable for one in (path, str(Path(path).parent))} - {"/"}:
        try:
            outcome = await sandbox.run(job(Path(directory)))
        except Failure as failure:  # a place that is the sandbox's own
            outcome = JobOutcome(status="isolation", why=failure.code)
        assert outcome.status == "isolation", directory
    # Nor through a link that leads there.
    (place / "link").symlink_to("/usr/lib")
    assert "programs or modules" in (await sandbox.run(job(place / "link"))).why


@pytest.mark.parametrize("inside", ["/tmp/x", "/tmp", "/usr", "/etc/x", "/proc", "/in/x", "/dev/shm", "/opt", "/"])
def test_a_place_of_the_sandbox_is_no_place_for_a_writable_mount(inside: str) -> None:
    with pytest.raises(Failure) as refused:
        Mount(Path(inside), inside, writable=True)
    assert refused.value.code == "E3308"
