"""Which files the machines of a store compare, besides policy, principals and keys."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson
import psycopg
import pytest

from interlock import Failure, Interlock
from interlock.api.config_diff import compare_machines
from interlock.store.home import Home
from interlock.store.node_files import describe, differences
from interlock.store.postgres import leases
from tests.support.bounds import until
from tests.support.cluster import NOT_COPIED
from tests.support.postgres import Server

SETTINGS = """
counter = "counting.py:count"

[[hooks]]
id = "look"
when = "pre"
run = "code/hooks.py:look"

[[hooks]]
id = "installed"
when = "pre"
run = "node_hooks.ours:look"

[[trusted_issuers]]
iss = "https://a.example"
audience = "interlock"
jwks = "login.json"

[[trusted_issuers]]
iss = "https://b.example"
audience = "interlock"
jwks = "https://b.example/jwks.json"
"""
HOOK = "def look(context):\n    return None\n"
FILES = {
    "settings.toml": SETTINGS,
    "counting.py": "def count(text):\n    return len(text)\n",
    "code/hooks.py": HOOK,
    "login.json": '{"keys": []}',
    "manifests/a.json": '{"execution": {"kind": "function", "target": "m:f"}}',
    "manifests/b.yaml": "execution:\n  target: m:f\n",
    "selection/router-1.npz": "numbers",
    "selection/router-1.former": "older numbers",
}
HomeOf = Callable[..., Home]
BROKEN = (
    "hooks = 5",
    "counter = 5\nhooks = [5, {}, {run = 5}, {run = ''}, {run = 'x'}, {run = '.x.:f'}, {run = '\\u0000.py:f'}]",
    "trusted_issuers = {jwks = 'a'}",
    "[[trusted_issuers]]\njwks = '/dev/zero'\n[[trusted_issuers]]\njwks = \"\\u0000\"\n[[trusted_issuers]]\njwks = '.'",
    "counter = 'no_such_package.of_ours:count'",
    "not toml",
    "large = 99999999999999999999999999",
    f"deep = {'[' * 20_000}",
    f"nested = {'[' * 300}{']' * 300}",
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that is installed on this machine."""
    package = tmp_path / "site" / "node_hooks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "ours.py").write_text(HOOK)
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    return package / "ours.py"


def written(home: Path, **files: str) -> None:
    for name, text in {**FILES, **files}.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def document(**members: Any) -> str:
    return orjson.dumps(members).decode()


@pytest.fixture
def home_of(tmp_path: Path) -> HomeOf:
    def make(**files: str) -> Home:
        written(tmp_path / "home", **files)
        return Home(tmp_path / "home")

    return make


async def test_code_keys_manifests_and_routers_that_differ_are_told(
    tmp_path: Path, postgres_server: Server, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 0.01)
    address, home, other = postgres_server.new_schema(), tmp_path / "one", tmp_path / "other"
    written(home)
    async with Interlock.open(home, store=address, housekeeping=False) as one:
        shutil.copytree(home, other, ignore=NOT_COPIED)
        async with Interlock.open(other, store=address, housekeeping=False):

            async def told(*names: str) -> None:
                async def now() -> bool:
                    found = differences(one.home)
                    assert {difference.directory for difference in found} <= {str(other)}
                    return [difference.file for difference in found] == list(names)

                await until(now, f"that {names} differ")
                assert compare_machines(one.home).differences.keys() == set(names)

            assert describe(one.home)["files"]["node_hooks.ours"]
            await told()
            for changed, name in (
                ("code/hooks.py", "code/hooks.py"),
                ("counting.py", "counting.py"),
                ("login.json", "login.json"),
                ("manifests/a.json", "manifests"),
                ("manifests/b.yaml", "manifests"),
                ("selection/router-1.npz", "selection"),
                ("selection/router-1.former", "selection"),
            ):
                path = other / changed
                before = path.read_text()
                path.write_text(f"{before}\n")
                await told(name)
                path.unlink()
                await told(name)
                path.write_text(before)
                await told()
            # Of these, all that counts is in the store, or concerns this machine alone.
            program = {"kind": "program", "target": "true"}
            (other / "manifests" / "c.json").write_text(document(execution=program))
            (other / "manifests" / "d.json").write_text(document(sandbox={}, execution={"target": "m:f"}))
            (other / "manifests" / ".e.json.5").write_text("half of a fi")
            (other / "selection" / "mine.txt").write_text("notes")
            (other / "code" / "more.py").write_text("")
            (other / "code" / "hooks.py").write_text(f"{HOOK}# last\n")
            await told("code/hooks.py")


def test_code_that_is_installed_in_another_form_has_another_digest(home_of: HomeOf, installed: Path) -> None:
    home = home_of()
    before = describe(home)["files"]["node_hooks.ours"]
    assert before == describe(home)["files"]["node_hooks.ours"] != ""
    installed.write_text(f"{HOOK}# another\n")
    assert describe(home)["files"]["node_hooks.ours"] not in ("", before)
    installed.unlink()
    assert describe(home)["files"]["node_hooks.ours"] == ""


@pytest.mark.parametrize("text", BROKEN)
def test_settings_that_cannot_be_used_end_no_lease(home_of: HomeOf, text: str) -> None:
    files = describe(home_of(**{"settings.toml": text}))["files"]
    assert files["settings.toml"]
    assert not any(digest for name, digest in files.items() if name not in ("settings.toml", "manifests", "selection"))


NO_UTF8 = b"\xff"


def test_names_that_are_no_utf8_are_compared_as_they_are(tmp_path: Path) -> None:
    home = Home(os.fsdecode(os.fsencode(tmp_path) + b"/" + NO_UTF8))
    written(home.path)
    before = orjson.dumps(describe(home))
    for directory, ending, name in (
        ("manifests", b".yaml", "manifests"),
        ("keys/issuer", b".pem", "keys/issuer"),
        ("selection", b".npz", "selection"),
    ):
        (home.path / directory).mkdir(parents=True, exist_ok=True)
        prefix = b"router-" if directory == "selection" else b""
        seen = {describe(home)["files"][name]}
        for more in (b"", b"\xfe"):
            path = os.fsencode(home.path / directory) + b"/" + prefix + NO_UTF8 + more + ending
            Path(os.fsdecode(path)).write_text("x: 1")
            seen.add(describe(home)["files"][name])
        assert len(seen) == 3
    assert orjson.dumps(describe(home)) != before


FULL = """
import asyncio, os, resource, sys
from interlock import Interlock
from interlock.store.postgres import leases

leases.RENEW_EVERY_S = 0.05


async def main() -> None:
    async with Interlock.open(sys.argv[1], store=sys.argv[2], housekeeping=False) as app:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
        try:
            while True:
                os.dup(0)
        except OSError:
            print(app.instance.id, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(app.instance.lost, flush=True)
        os._exit(0)


asyncio.run(main())
"""


async def test_a_lease_is_renewed_by_a_process_that_can_open_no_file(tmp_path: Path, postgres_server: Server) -> None:
    address = postgres_server.new_schema()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FULL, tmp_path, address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        instance = (await process.stdout.readline()).decode().strip()
        with psycopg.connect(address, autocommit=True) as connection:

            def until_ms() -> int:
                row = connection.execute("SELECT until_ms FROM instance WHERE id = %s", (instance,)).fetchone()
                assert row is not None
                return row[0]

            async def renewed() -> bool:
                return until_ms() > before

            for _ in range(3):
                before = until_ms()
                await until(renewed, "the lease is renewed")
        assert (await process.communicate(b""))[0].decode().strip() == "False"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_lease_is_renewed_whatever_is_wrong_with_the_files(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 0.01)
    asked: list[Home] = []

    def broken(home: Home) -> dict[str, Any]:
        asked.append(home)
        raise RuntimeError("a fault of ours")

    async with Interlock.open(tmp_path / "home", store=postgres_server.new_schema(), housekeeping=False) as app:
        before = list(app.home.signs_of_life())
        lease = cast("leases.Lease", app.instance)
        monkeypatch.setattr(leases, "describe", broken)

        async def several() -> bool:
            return len(asked) > 3

        await until(several)
        assert list(app.home.signs_of_life()) == before
        assert not lease.lost
        assert lease.sure()
    assert [record.message for record in caplog.records if "lease" in record.message] == [
        "a renewal of the lease met an error: RuntimeError('a fault of ours')"
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_lease_that_nobody_renews_any_more_is_lost(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server looks at this, and ends."""
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 0.01)

    def ends(_: leases.Lease) -> None:
        raise SystemExit

    async with Interlock.open(tmp_path / "home", store=postgres_server.new_schema(), housekeeping=False) as app:
        assert not app.instance.lost
        monkeypatch.setattr(leases.Lease, "_renew", ends)

        async def lost() -> bool:
            return app.instance.lost

        await until(lost, "the lease is lost")


async def test_a_process_whose_write_is_refused_for_its_lease_has_lost_it(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the thread that renews the lease hangs, for example in a network file system."""
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 3600.0)
    address = postgres_server.new_schema()
    async with Interlock.open(tmp_path / "home", store=address, housekeeping=False) as app:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("DELETE FROM instance")
        assert not app.instance.lost
        with pytest.raises(Failure, match="taken for dead"):
            await app.journal.commit(lambda transaction: transaction.now_ms)
        assert app.instance.lost


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"execution": []}', '{"execution": {"kind": ["x"]}}', "[" * 100_000])
def test_a_manifest_that_cannot_be_read_is_compared_as_it_is(home_of: HomeOf, text: str) -> None:
    digests = {
        describe(home_of(**{f"manifests/x.{ending}": f"{text}{more}"}))["files"]["manifests"]
        for ending in ("json", "yaml")
        for more in ("", " ")
    }
    assert len(digests - {""}) == 4
