"""The program before the newest migration, from the history of this repository, beside this one on one store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

import interlock
from interlock.audit.chain import verify
from interlock.store import migration_list, schema_status
from interlock.store.homes import home_at
from interlock.store.schema_version import SCHEMA_HEAD
from tests.support import forked, releases
from tests.support.postgres import Server

HERE = str(Path(interlock.__file__).parents[1])

PROGRAM = """
import asyncio, sys
from interlock import Failure, Interlock
from interlock.demo_tools import balance, post
try:
    from interlock.store.schema_version import SCHEMA_HEAD
except ImportError:  # an earlier release
    from interlock.store.home import SCHEMA_HEAD

async def main(home, store, first):
    async with Interlock.open(home, store=store, housekeeping=False) as app:
        if first:
            await app.add(balance, post)
        for one in (balance, post):
            app.catalog.attach(one)
        print(SCHEMA_HEAD, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            result = await app.call("demo.post", {"account": "cash", "cents": 5}, key=line.strip())
            print("replayed" if result.replayed else "done" if result.ok else result.error.code, flush=True)

try:
    asyncio.run(main(*sys.argv[1:]))
except Failure as failure:
    print(failure.code, failure.message, flush=True)
"""


class Running:
    """A program that calls a tool for each key that it is given."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.said = self._line()

    def post(self, key: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{key}\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def running(source: str, home: Path, store: str, first: str = "") -> Generator[Running]:
    # This program is loaded already. The other one needs an interpreter that has loaded nothing.
    here = source == HERE
    process = subprocess.Popen(
        [*(forked.python() if here else (sys.executable,)), "-c", PROGRAM, str(home), store, first],
        env={**os.environ} if here else {**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Running(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sources as they were before the newest migration was added: until there are releases, the one before."""
    versions = migration_list.SCRIPTS / "versions"
    (newest,) = versions.glob(f"{SCHEMA_HEAD}_*.py")
    found = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--diff-filter=A", "--", str(newest)],
        cwd=releases.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return str(releases.unpack(f"{found.stdout.strip()}^", tmp_path_factory.mktemp("before")))


@pytest.mark.proves("OPS-08")
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_the_program_before_the_newest_migration_works_beside_this_one_and_on_its_schema(
    before: str, database: str, tmp_path: Path, postgres_server: Server
) -> None:
    home, store = tmp_path / "home", "" if database == "sqlite" else postgres_server.new_schema()
    earlier = migration_list.migrations()[-2].revision
    assert migration_list.compatible_since(SCHEMA_HEAD) <= earlier
    with running(before, home, store, "first") as old:
        assert (old.said, old.post("a")) == (earlier, "done")
        with running(HERE, home, store) as new:
            if database == "sqlite":
                assert new.said.startswith("E3804 1 process runs on this data directory")
            else:  # it migrates under the other
                assert (new.said, new.post("a"), new.post("b")) == (SCHEMA_HEAD, "replayed", "done")
                assert (old.post("b"), old.post("c"), new.post("c")) == ("replayed", "done", "replayed")
        assert old.post("d") == "done"
    with running(HERE, home, store) as new:
        assert (new.said, new.post("d"), new.post("e")) == (SCHEMA_HEAD, "replayed", "done")
    with running(before, home, store) as old:
        assert (old.said, old.post("e"), old.post("f")) == (earlier, "replayed", "done")
    assert schema_status.status(home_at(home, store)).schema == SCHEMA_HEAD
    assert verify(home_at(home, store)).faults == ()
