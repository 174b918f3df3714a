"""Two servers on one store: calls of several sessions on resources whose names overlap, which read or write them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bounds import PATIENCE_S, until
from tests.support.cli import Cli
from tests.support.cluster import SERVE, Node, prepare
from tests.support.postgres import Server
from tests.thorough import THOROUGH

ROUNDS = 20 if THOROUGH else 1
# How long those wait who cannot get their turn.
SOON_MS = 1000
# A conflict or, where their deadline passes before they ask for the locks, the deadline.
KEPT_AWAY = {"E3410", "E3002"}

TOOLS = '''
import asyncio
import os
from functools import partial
from typing import Annotated

from interlock import Effect, Field, Precondition, Preview, tool

PLACE = {place!r}
write = partial(tool, version="1.0.0", mutation_class="write_reversible", namespace="over", timeout_s=600)
Name = Annotated[str, Field(description="a name", examples=["a"])]


def meet(one: str, other: str) -> bool:
    """Whether two names of parts of a tree have a part in common."""
    if one.endswith("*") or other.endswith("*"):
        one, other = (name[:-1] if name.endswith("*") else name + "/" for name in (one, other))
        return one.startswith(other) or other.startswith(one)
    return all(mine == theirs for mine, theirs in zip(one.split("/"), other.split("/")))


def note(file: str, line: str) -> None:
    descriptor = os.open(os.path.join(PLACE, file), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (line + "\\n").encode())
    os.close(descriptor)


async def stay(mode: str, name: str, label: str) -> str:
    """Show that a call is inside, look who else is, and stay for a moment or until it may leave."""
    inside, own = os.path.join(PLACE, "inside"), ",".join((mode, name.replace("/", "+"), label))
    open(os.path.join(inside, own), "w").close()
    for found in os.listdir(inside):
        other, there, _ = found.split(",")
        if found != own and "w" in (mode, other) and meet(name, there.replace("+", "/")):
            note("met", own + " " + found)
    await asyncio.sleep(0.002)
    while label.startswith("held") and not os.path.exists(os.path.join(PLACE, "leave-" + label)):
        await asyncio.sleep(0.01)
    os.unlink(os.path.join(inside, own))
    note("done", label)
    return label


@write(effects=[Effect("tree:{{name}}", "UPDATE")])
async def change(name: Name, label: Name) -> str:
    """Change a part of the tree."""
    return await stay("w", name, label)


@write(effects=[Effect("leaf:{{label}}", "CREATE")], preconditions=[Precondition("tree:{{name}}")])
async def derive(name: Name, label: Name) -> str:
    """Make something of a part of the tree, which has to stay as it is meanwhile."""
    return await stay("r", name, label)


derive.version_of(lambda resource: 1)
for one in (change, derive):
    one.preview(lambda name, label: Preview(impact="a part"))
    one.compensate(lambda name, label: None)
'''
# Names that overlap with `a/x`, and others.
OVERLAPPING, APART = ("a", "a/x", "a/x/1", "a*"), ("a/y", "ab", "b")
NAMES = OVERLAPPING + APART


class Two:
    """Two servers, and the tokens of two callers."""

    def __init__(self, place: Path, nodes: list[Node], tokens: Sequence[str]) -> None:
        self.place = place
        self.nodes = nodes
        self.tokens = tokens
        self._sessions = itertools.count()

    async def call(
        self, web: httpx.AsyncClient, at: int, tool: str, name: str, label: str, timeout_ms: int | None = None
    ) -> str:
        """Call a tool at one server, in a session of its own. Returns the code of its failure, or nothing."""
        number = next(self._sessions)
        sent: dict[str, Any] = {"tool_id": f"over.{tool}", "parameters": {"name": name, "label": label}}
        sent |= {"idempotency_key": label, "session_id": f"session-{number}"}
        sent |= {} if timeout_ms is None else {"timeout_ms": timeout_ms}
        headers = {"authorization": f"Bearer {self.tokens[number % len(self.tokens)]}"}
        answer = await web.post(f"{self.nodes[at].rest}/tools/invoke", json=sent, headers=headers)
        return "" if answer.status_code == 200 else answer.json()["error"]["error_code"]

    def lines(self, file: str) -> list[str]:
        path = self.place / file
        return path.read_text().splitlines() if path.exists() else []

    async def entered(self, label: str) -> None:
        async def inside() -> bool:
            return any(path.name.endswith(f",{label}") for path in (self.place / "inside").iterdir())

        await until(inside)


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S, pool=None))


@pytest.fixture(params=["sqlite", "postgres"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Two]:
    (tmp_path / "over_tools.py").write_text(TOOLS.format(place=str(tmp_path)))
    (tmp_path / "inside").mkdir()
    if request.param == "sqlite":  # two servers on one data directory
        clis = [Cli(tmp_path / "0")]
    else:
        server: Server = request.getfixturevalue("postgres_server")
        address = server.new_schema()
        clis = [Cli(tmp_path / str(number), {"INTERLOCK_STORE": address}) for number in range(2)]
    token = prepare(clis, tmp_path / "over_tools.py", "over.*")
    other = clis[0]("token", "issue", "--agent", "second", "--tool", "over.*", "--ttl", "8h")
    assert other.code == 0, other.err
    (tmp_path / "done").unlink(missing_ok=True)  # what the contract tests did
    nodes = [Node(clis[number % len(clis)], SERVE) for number in range(2)]
    try:
        for node in nodes:
            assert node.start(), node.log.read_text()
        yield Two(tmp_path, nodes, (token, other.out.strip()))
    finally:
        for node in nodes:
            node.end()


@pytest.mark.proves("EFFECT-06")
async def test_calls_on_overlapping_names_never_meet_across_sessions_and_nodes_and_all_end(two: Two) -> None:
    async with client() as web:
        made: list[tuple[int, str, str, str]] = []
        for turn in range(ROUNDS):
            made = [
                (at, tool, name, f"{turn}-{tool}-{name.replace('/', '.').replace('*', 's')}-{at}")
                for name in NAMES
                for tool in ("change", "derive")
                for at in range(2)
            ]
            told = await asyncio.gather(*(two.call(web, *one) for one in made))
            assert set(told) == {""}
    assert two.lines("met") == []
    assert len(two.lines("done")) == ROUNDS * len(made)


@pytest.mark.proves("EFFECT-06")
@pytest.mark.parametrize("holds", ["derive", "change"])
async def test_who_reads_keeps_writers_of_overlapping_names_away_and_who_writes_keeps_readers_away_too(
    two: Two, holds: str
) -> None:
    async with client() as web:
        held = asyncio.ensure_future(two.call(web, 0, holds, "a/x", "held"))
        await two.entered("held")

        async def told(tool: str, names: Collection[str], timeout_ms: int | None = None) -> set[str]:
            made = [two.call(web, 1, tool, name, f"{tool}-{NAMES.index(name)}", timeout_ms) for name in names]
            return set(await asyncio.gather(*made))

        # Those who are kept away are let go before others ask, who would wait behind them.
        if holds == "change":
            assert await told("derive", OVERLAPPING, SOON_MS) <= KEPT_AWAY
        assert await told("derive", APART if holds == "change" else NAMES) == {""}
        assert await told("change", OVERLAPPING, SOON_MS) <= KEPT_AWAY
        assert await told("change", APART) == {""}
        assert not held.done()
        (two.place / "leave-held").touch()
        assert await held == ""
        # Nothing is left locked.
        again = [two.call(web, at, "change", name, f"again-{at}-{n}") for at in (0, 1) for n, name in enumerate(NAMES)]
        assert set(await asyncio.gather(*again)) == {""}
    assert two.lines("met") == []
