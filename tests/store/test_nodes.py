"""Three servers with data directories of their own on one PostgreSQL store: nothing is weaker than on one machine.

They have a policy engine and a Redis server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest

from interlock import Failure, Interlock
from interlock.api.registration import Registration
from interlock.contract.manifest import CircuitBreakerConfig
from interlock.registry import quarantine
from tests import warm
from tests.support import forked
from tests.support.bounds import PATIENCE_S, lag_of, until, within_a_second
from tests.support.cli import Cli
from tests.support.cluster import NOT_COPIED, SERVE, address_of, prepare
from tests.support.postgres import Server
from tests.support.redis import Server as Redis
from tests.thorough import THOROUGH

KEYS = 1000 if THOROUGH else 100
RACES = 1000 if THOROUGH else 20
AT_ONCE = 10
NODES = 3
PAID = 10
LIMIT = 10

SETTINGS_LEFT = "numbers of parts that are not built"

TOOLS = '''
import asyncio
import os
from functools import partial
from typing import Annotated

from interlock import Context, Effect, Failure, Field, Precondition, Preview, tool

PLACE = {place!r}
write = partial(tool, version="1.0.0", mutation_class="write_reversible", namespace="nodes", timeout_s=600)
Name = Annotated[str, Field(description="a name", examples=["a"])]


def note(file: str, line: str) -> None:
    """Add a line to a file that all nodes share, in one write."""
    descriptor = os.open(os.path.join(PLACE, file), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (line + "\\n").encode())
    os.close(descriptor)


@write(effects=[Effect("entry:{{name}}", "CREATE")])
async def post(name: Name) -> str:
    """Make an entry."""
    note("entries", name)
    return name


@write(effects=[Effect("account:cash", "UPDATE")])
async def inside(name: Name) -> str:
    """Be alone with the account for a moment."""
    marker = os.path.join(PLACE, "inside")
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        note("met", name)
        return name
    await asyncio.sleep(0.002)
    os.unlink(marker)
    note("entered", name)
    return name


@write(effects=[Effect("bill:{{name}}", "CREATE")], estimated_cost=1.0)
async def pay(context: Context, name: Name) -> str:
    """Spend one unit."""
    context.cost(external_api=1.0)
    note("paid", name)
    return name


@write(effects=[Effect("gate:{{name}}", "CREATE")])
async def gated(name: Name) -> str:
    """Make an entry, and wait until it may end."""
    note("gated", name)
    while name != "a" and not os.path.exists(os.path.join(PLACE, "open")):  # the example ends at once
        await asyncio.sleep(0.01)
    return name


@write(effects=[Effect("slow:{{name}}", "CREATE")])
async def hang(name: Name) -> str:
    """Make an entry and never return."""
    note("hung", name)
    await asyncio.sleep(3600)
    return name


def document(name: str) -> tuple[int, str]:
    with open(os.path.join(PLACE, name)) as file:
        version, body = file.read().split()
    return int(version), body


@write(effects=[Effect("doc:{{name}}", "UPDATE")], preconditions=[Precondition("doc:{{name}}", "{{seen}}")])
async def edit(name: Name, body: Name, seen: Annotated[str | None, Field(description="a version")] = None) -> int:
    """Write a document anew: it is read first, and written over a moment later."""
    version = document(name)[0] + 1
    await asyncio.sleep(0.001)
    with open(os.path.join(PLACE, f"{{name}}.{{body}}"), "w") as file:
        file.write(f"{{version}} {{body}}")
    os.replace(file.name, os.path.join(PLACE, name))
    return version


edit.version_of(lambda resource: document(resource.removeprefix("doc:"))[0])
edit.preview(lambda name, body, seen=None: Preview(impact="a document"))
edit.compensate(lambda result: None)


@write(effects=[Effect("limited:{{name}}", "CREATE")])
async def limited(name: Name) -> str:
    """Make an entry, as often as may be."""
    note("limited", name)
    return name


read = partial(tool, version="1.0.0", mutation_class="read_only", namespace="nodes")


@read()
async def counted(name: Name) -> str:
    """Look something up, as often as may be."""
    return name


@read(external_service="maps")
async def ask_route(name: Name) -> str:
    """Ask a service, as often as may be."""
    return name


@read(external_service="maps")
async def ask_places(name: Name) -> str:
    """Ask the same service for something else."""
    return name


@read(external_service="post office")
async def track(name: Name) -> str:
    """Ask a service that may say when to come again."""
    note("tracked", name)
    if name == "hasty":
        raise Failure("E3504", "slow down", retry_after_ms=3_600_000)
    return name


for one in (post, inside, pay, gated, hang, limited):
    one.preview(lambda name: Preview(impact="an entry"))
    one.compensate(lambda name: None)
'''


class Node(NamedTuple):
    """A server, and the command line on its data directory."""

    cli: Cli
    process: warm.Started
    rest: str

    async def redis(self, client: httpx.AsyncClient) -> str:
        """How Redis is for this node."""
        return (await client.get(f"{self.rest.removesuffix('/v1')}/ready")).json()["dependencies"].get("redis", "")


ENGINE = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLACE = sys.argv[1]

class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        subject = json.loads(self.rfile.read(int(self.headers["content-length"])))["subject"]
        with open(os.path.join(PLACE, "asked"), "a") as asked, open(os.path.join(PLACE, "denied")) as denied:
            asked.write(subject + "\\n")
            allowed = subject not in denied.read().splitlines()
        body = json.dumps({"decision": "allow" if allowed else "deny"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def _engine(place: Path) -> Generator[str]:
    """A policy engine that allows everything, but for those whom a file names."""
    (place / "denied").write_text("")
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", ENGINE, str(place)], stdout=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        yield f"http://127.0.0.1:{program.stdout.readline().strip()}/"
        program.kill()


class Nodes:
    """Servers on one store."""

    def __init__(self, place: Path, address: str, token: str, redis: Redis) -> None:
        self.place = place
        self.address = address
        self.token = token
        self.redis = redis
        self.running: list[Node] = []

    def issue(self, agent: str) -> str:
        """A token for somebody who may call all tools."""
        return self.running[0].cli("token", "issue", "--agent", agent, "--tool", "nodes.*", "--ttl", "1h").out.strip()

    async def connected(self, web: httpx.AsyncClient) -> None:
        """Wait until every node has subscribed."""
        for node in self.running:

            async def healthy(node: Node = node) -> bool:
                return await node.redis(web) == "healthy"

            await until(healthy)

    async def use_up(self, web: httpx.AsyncClient, token: str) -> list[Any]:
        """Make more calls of a limited tool than are allowed, at all nodes at once."""
        keys = [(node, secrets.token_hex(8)) for node in self.running for _ in range(LIMIT)]
        return await asyncio.gather(*(self.call(web, node, "limited", key, key, token) for node, key in keys))

    async def publish(self, *subjects: str) -> None:
        message = json.dumps({"affected_subjects": subjects}).encode()
        await asyncio.to_thread(self.redis.ask, "PUBLISH", "abac:policy:updates", stdin=message)

    @contextmanager
    def denying(self, subject: str) -> Generator[None]:
        """Let the policy engine deny what somebody asks for."""
        (self.place / "denied").write_text(subject)
        yield
        (self.place / "denied").write_text("")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def lines(self, file: str) -> list[str]:
        path = self.place / file
        return path.read_text().splitlines() if path.exists() else []

    async def call(
        self,
        client: httpx.AsyncClient,
        node: Node,
        tool: str,
        name: str,
        key: str,
        token: str = "",
        timeout_ms: int | None = None,
        **given: str | None,
    ) -> Any:
        """Call a tool at one node. Returns its status and its answer."""
        sent: dict[str, Any] = {"tool_id": f"nodes.{tool}", "parameters": {"name": name, **given}}
        sent |= {"idempotency_key": key} | ({} if timeout_ms is None else {"timeout_ms": timeout_ms})
        headers = {"authorization": f"Bearer {token or self.token}"}
        answer = await client.post(f"{node.rest}/tools/invoke", json=sent, headers=headers)
        return answer.status_code, answer.json()


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S, pool=None), limits=httpx.Limits(max_connections=60))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, postgres_server: Server) -> Generator[Nodes]:
    place = tmp_path_factory.mktemp("nodes")
    address = postgres_server.new_schema()
    (place / "node_tools.py").write_text(TOOLS.format(place=str(place)))
    with ExitStack() as stack:
        engine, redis = stack.enter_context(_engine(place)), Redis()
        stack.callback(redis.remove)
        settings = (
            f'policy_engine = "remote"\npolicy_url = "{engine}"\npolicy_timeout_s = 30\npolicy_arguments = "none"\n'
            f'[[budgets]]\nper = "tenant"\nlimit = {PAID}\ntools = "nodes.pay"\n'
            f'[[rate_limits]]\nper = "caller"\nlimit = {LIMIT}\nwindow_s = 86400\ntools = "nodes.limited"\n'
            f'[[rate_limits]]\nper = "tool"\nlimit = {LIMIT}\nwindow_s = 86400\ntools = "nodes.counted"\n'
            f'[[rate_limits]]\nper = "service"\nlimit = {LIMIT}\nwindow_s = 86400\ntools = "nodes.ask_*"\n'
        )
        chosen = {"INTERLOCK_STORE": address, "INTERLOCK_REDIS": redis.url}
        clis = [Cli(place / str(number), chosen) for number in range(NODES)]
        token = prepare(clis, place / "node_tools.py", "nodes.*", settings)
        made = Nodes(place, address, token, redis)
        made.running += [stack.enter_context(_started(cli)) for cli in clis]
        yield made


@contextmanager
def _started(cli: Cli) -> Generator[Node]:
    with warm.start(SERVE, cli.environment, cli.path) as process:
        rest = address_of(process)
        assert rest, process.communicate()[1].decode()
        yield Node(cli, process, rest)


async def everywhere(nodes: Nodes, reached: Callable[[Node], Awaitable[bool]], what: str) -> float:
    """Wait until a change that was just acknowledged counts at every node. Returns for how long it did not count."""
    lags = [lag_of(lambda node=node: reached(node), f"{what} at {node.cli.home.parent.name}") for node in nodes.running]
    return max(await asyncio.gather(*lags))


@pytest.mark.proves("IDEM-07")
async def test_a_key_that_all_nodes_get_at_once_has_one_effect(nodes: Nodes) -> None:
    async with client() as web:
        names = [f"key-{number}" for number in range(KEYS)]

        async def post(node: Node, name: str) -> None:
            async def answered() -> bool:
                status, told = await nodes.call(web, node, "post", name, name)
                assert status == 200 or told["error"]["error_code"] == "E3408", told  # it runs elsewhere, for long
                return status == 200

            await until(answered)

        await asyncio.gather(*(post(node, name) for name in names for node in nodes.running))
    assert Counter(nodes.lines("entries")) == Counter(names)


@pytest.mark.proves("IDEM-07")
async def test_of_identical_calls_at_all_nodes_one_runs_and_the_others_wait_for_it_or_are_told_when_to_ask_again(
    nodes: Nodes,
) -> None:
    async with client() as web:

        def call(number: int, timeout_ms: int | None = None) -> asyncio.Future[Any]:
            node = nodes.running[number % NODES]
            return asyncio.ensure_future(nodes.call(web, node, "gated", "same", "same", timeout_ms=timeout_ms))

        async def runs() -> bool:
            return nodes.lines("gated") == ["same"]

        calls = [call(number) for number in range(48)]
        await until(runs)
        for status, told in await asyncio.gather(*(call(number, 3000) for number in range(NODES))):
            assert (status, told["error"]["error_code"], told["error"]["errorCode"]) == (409, "E3408", "CONFLICT"), told
            assert told["error"]["retryAfterMs"] > 0
        (nodes.place / "open").touch()
        answers = await asyncio.gather(*calls)
    assert {status for status, _ in answers} <= {200, 409}
    assert {told["result"] for status, told in answers if status == 200} == {"same"}
    assert {told["error"]["error_code"] for status, told in answers if status == 409} <= {"E3408"}
    # Some waited at each node, also at the two at which nothing ran.
    assert {number % NODES for number, (status, _) in enumerate(answers) if status == 200} == {*range(NODES)}
    assert nodes.lines("gated") == ["same"]


@pytest.mark.proves("AUDIT-02")
async def test_the_same_input_has_the_same_hash_on_every_node(nodes: Nodes) -> None:
    async with client() as web:
        for number, node in enumerate(nodes.running):
            assert (await nodes.call(web, node, "post", "naïve 😀", f"hash-{number}"))[0] == 200
    with closing(psycopg.connect(nodes.address, autocommit=True)) as connection:
        rows = connection.execute("SELECT convert_from(body, 'UTF8') FROM journal WHERE kind = 'closed'").fetchall()
    found = [one for one in (json.loads(body) for (body,) in rows) if str(one["idempotencyKey"]).startswith("hash-")]
    assert [one["inputHash"] for one in found] == [hashlib.sha256('{"name":"naïve 😀"}'.encode()).hexdigest()] * NODES


@pytest.mark.proves("EFFECT-06")
async def test_calls_of_several_nodes_are_never_inside_together(nodes: Nodes) -> None:
    count = 30 if THOROUGH else 10
    async with client() as web:
        names = [f"{number}-{at}" for number in range(count) for at in range(NODES)]
        calls = [nodes.call(web, nodes.running[int(name[-1])], "inside", name, name) for name in names]
        answers = await asyncio.gather(*calls)
    assert nodes.lines("met") == []
    # One that waited too long for its turn was refused, and did nothing.
    assert len(nodes.lines("entered")) == sum(status == 200 for status, _ in answers) > 0


@pytest.mark.proves("EFFECT-06")
async def test_of_two_writes_by_two_nodes_one_at_least_succeeds_and_the_other_may_conflict(nodes: Nodes) -> None:
    async def race(web: httpx.AsyncClient, number: int) -> None:
        name = f"doc-{number}"
        (nodes.place / name).write_text("7 before")
        # Both decided on version 7; or the second did not look at all.
        given: dict[str, dict[str, Any]] = {"A": {"seen": "7"}, "B": {"seen": "7"} if number % 2 else {}}
        where = {"A": nodes.running[number % NODES], "B": nodes.running[(number + 1) % NODES]}

        async def write(body: str) -> bool:
            status, told = await nodes.call(web, where[body], "edit", name, f"{body}{number}", body=body, **given[body])
            assert status == 200 or told["error"]["error_code"] == "E3410", told
            return status == 200

        done = dict(zip("AB", await asyncio.gather(write("A"), write("B")), strict=True))
        count = sum(done.values())
        assert count == 1 or (number % 2 == 0 and count == 2)
        version, body = (nodes.place / name).read_text().split()
        assert int(version) == 7 + count
        assert done[body]

    async with client() as web:
        for start in range(0, RACES, AT_ONCE):
            await asyncio.gather(*(race(web, number) for number in range(start, start + AT_ONCE)))


async def test_a_budget_is_not_overshot_by_all_nodes_together(nodes: Nodes) -> None:
    async with client() as web:
        names = [f"{number}-{at}" for number in range(PAID) for at in range(NODES)]
        calls = [nodes.call(web, nodes.running[int(name[-1])], "pay", name, name) for name in names]
        answers = await asyncio.gather(*calls)
    paid = [status for status, _ in answers if status == 200]
    assert 0 < len(paid) <= PAID
    assert len(nodes.lines("paid")) == len(paid)


@asynccontextmanager
async def fourth_node(nodes: Nodes, home: Path) -> AsyncGenerator[Interlock]:
    """One more data directory on the store, in this process."""
    shutil.copytree(nodes.running[0].cli.home, home, ignore=NOT_COPIED)
    async with Interlock.open(home, store=nodes.address, housekeeping=False) as opened:
        yield opened


async def test_a_revoked_token_is_refused_by_every_node(nodes: Nodes, tmp_path: Path) -> None:
    async with fourth_node(nodes, tmp_path / "home") as fourth, client() as web:

        async def revoke(number: int) -> float:
            token, key = nodes.issue(f"leaver{number}"), f"before{number}"
            for node in nodes.running:
                assert (await nodes.call(web, node, "post", key, key, token))[0] == 200

            async def refused(node: Node) -> bool:
                status, told = await nodes.call(web, node, "post", key, key, token)
                assert status == 200 or (status, told["error"]["error_code"]) == (401, "E3201"), told
                return status != 200

            await fourth.tokens.revoke(token, reason="it left", by=fourth.caller)
            return await everywhere(nodes, refused, "the revocation")

        await within_a_second(revoke)


async def test_a_change_of_the_registry_is_seen_by_every_node(nodes: Nodes, tmp_path: Path) -> None:
    async with fourth_node(nodes, tmp_path / "home") as fourth, client() as web:
        registration = Registration(fourth, fourth.admissions)

        async def deprecate(number: int) -> float:
            tool = ("post", "inside", "limited")[number]
            guide = f"https://example.com/{secrets.token_hex(8)}"

            async def told(node: Node) -> bool:
                listed = await web.get(f"{node.rest}/tools/nodes.{tool}", headers=nodes.headers)
                return guide in listed.text

            for node in nodes.running:
                assert not await told(node)
            await registration.deprecate(f"nodes.{tool}", "1.0.0", guide=guide, by=fourth.caller)
            return await everywhere(nodes, told, "the deprecation")

        await within_a_second(deprecate)


@pytest.mark.proves("EFFECT-04")
async def test_a_tool_in_quarantine_is_refused_by_every_node_until_a_person_lifts_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    async with fourth_node(nodes, tmp_path / "home") as fourth, client() as web:
        headers = {"authorization": f"Bearer {nodes.token}"}

        async def called(node: Node) -> str | None:
            status, told = await nodes.call(web, node, "post", "before", f"q-{secrets.token_hex(8)}")
            return None if status == 200 else told["error"]["error_code"]

        async def refused(node: Node) -> bool:
            code = await called(node)
            assert code in (None, "E3210"), code
            return code is not None

        async def allowed(node: Node) -> bool:
            return not await refused(node)

        async def listed(node: Node) -> bool:
            told = (await web.get(f"{node.rest}/tools", headers=headers)).json()
            return "nodes.post" in [one["tool_id"] for one in told["tools"]]

        assert [await listed(node) for node in nodes.running] == [True] * NODES
        (version,) = (await fourth.catalog.versions("nodes.post")).values()

        async def impose(number: int) -> float:
            if number:
                await fourth.lift_quarantine("nodes.post@1.0.0", reason="once more")
                await everywhere(nodes, allowed, "the end of the quarantine")
            await fourth.journal.commit(quarantine.impose(version.row.digest, "nodes.post@1.0.0", "", "a test"))
            return await everywhere(nodes, refused, "the quarantine")

        await within_a_second(impose)
        assert [await listed(node) for node in nodes.running] == [False] * NODES
        agent = await fourth.caller_of(nodes.token)
        with pytest.raises(Failure) as denied:
            await fourth.lift_quarantine("nodes.post@1.0.0", reason="please", by=agent)
        assert denied.value.code == "E3206"
        assert [await called(node) for node in nodes.running] == ["E3210"] * NODES
        await fourth.lift_quarantine("nodes.post@1.0.0", reason="a test")
        await everywhere(nodes, allowed, "the end of the quarantine")
        rows = await fourth.journal.read(
            lambda reader: reader.all("SELECT body FROM journal WHERE kind = 'registry' ORDER BY seq DESC LIMIT 2")
        )
    lifted, imposed = (json.loads(body) for (body,) in rows)
    assert (imposed["event"], lifted["event"]) == ("tool.quarantined", "tool.quarantine_lifted")
    assert (lifted["by"], lifted["reason"]) == (fourth.caller.id, "a test")


@pytest.mark.part_of("OPS-06", rest=SETTINGS_LEFT)
async def test_machines_with_other_files_are_named(nodes: Nodes) -> None:
    first, other = nodes.running[0].cli, nodes.running[1].cli
    policy = other.home / "policy.cedar"
    before = policy.read_text()

    async def told(different: set[str]) -> bool:
        ended = await asyncio.to_thread(first, "config", "diff", "--json")
        document = ended.json
        assert ended.code == (0 if document["agree"] else 1)
        assert len(document["nodes"]) >= NODES
        if document["differences"].keys() != different:
            return False
        for groups in document["differences"].values():
            assert sorted(map(len, groups.values())) == [1, len(document["nodes"]) - 1]
            assert any(places == [one for one in places if one.endswith(str(other.home))] for places in groups.values())
        return True

    await until(lambda: told(set()), "that all files are the same")
    policy.write_text(f"{before}// another\n")
    try:
        await until(lambda: told({"policy.cedar"}), "that one machine has another policy")
    finally:
        policy.write_text(before)
    await until(lambda: told(set()), "that all files are the same again")


@pytest.mark.proves("AUTH-06")
async def test_a_decision_that_changed_counts_at_every_node_after_a_message(nodes: Nodes) -> None:
    token = nodes.issue("changing")
    async with client() as web:
        await nodes.connected(web)
        before = len(nodes.lines("asked"))

        async def allowed(node: Node) -> bool:
            status, _ = await nodes.call(web, node, "post", "decided", f"d-{secrets.token_hex(8)}", token)
            return status == 200

        for node in nodes.running:
            assert await allowed(node)
        (subject,) = set(nodes.lines("asked")[before:])

        async def denied(node: Node) -> bool:
            return not await allowed(node)

        async def deny(number: int) -> float:
            if number:
                await nodes.publish(subject)
                await everywhere(nodes, allowed, "the end of the denial")
            with nodes.denying(subject):
                # Nothing else would bring it: a decision is cached for five minutes, and the store has no order.
                await nodes.publish(subject)
                return await everywhere(nodes, denied, "the denial")

        await within_a_second(deny)


@pytest.mark.proves("AUTH-06")
async def test_nodes_that_missed_a_message_serve_no_stale_decision_once_they_have_a_subscription_again(
    nodes: Nodes,
) -> None:
    token = nodes.issue("missed")
    async with client() as web:
        await nodes.connected(web)
        before = len(nodes.lines("asked"))

        async def allowed(node: Node) -> bool:
            status, _ = await nodes.call(web, node, "post", "missed", f"m-{secrets.token_hex(8)}", token)
            return status == 200

        for node in nodes.running:
            assert await allowed(node)
        (subject,) = set(nodes.lines("asked")[before:])
        await asyncio.to_thread(nodes.redis.together, "ACL SETUSER default -subscribe", "CLIENT KILL TYPE pubsub")
        for number, node in enumerate(nodes.running):

            async def lost(node: Node = node) -> bool:
                return await node.redis(web) == "down"

            await until(lost, f"the loss of the subscription of node {number}")
            assert await allowed(node), "calls go on"
        with nodes.denying(subject):
            await nodes.publish(subject)
            await asyncio.to_thread(nodes.redis.ask, "ACL", "SETUSER", "default", "+subscribe")
            await nodes.connected(web)
            assert [await allowed(node) for node in nodes.running] == [False] * NODES


@pytest.mark.proves("RESIL-05")
async def test_a_limit_is_not_exceeded_by_all_nodes_together(nodes: Nodes) -> None:
    async with client() as web:
        answers = await nodes.use_up(web, nodes.issue("hasty"))
    refused = [told["error"] for status, told in answers if status != 200]
    assert len(answers) - len(refused) == LIMIT
    assert {one["error_code"] for one in refused} == {"E3003"}
    assert all(0 < one["retryAfterMs"] <= 86_400_000 for one in refused), refused


@pytest.mark.proves("RESIL-05")
@pytest.mark.parametrize("tools", [("counted",), ("ask_route", "ask_places")], ids=["tool", "service"])
async def test_nor_is_one_of_a_tool_or_service_whoever_calls(nodes: Nodes, tools: tuple[str, ...]) -> None:
    async with client() as web:
        calls = [
            nodes.call(web, node, tool, "a", secrets.token_hex(8), token)
            for token in (nodes.issue("one"), nodes.issue("other"))
            for node in nodes.running
            for tool in tools
            for _ in range(LIMIT // 2)
        ]
        answers = await asyncio.gather(*calls)
    refused = [told["error"] for status, told in answers if status != 200]
    assert len(answers) - len(refused) == LIMIT
    assert {(one["error_code"], one["errorCode"]) for one in refused} == {("E3003", "RATE_LIMITED")}
    assert all(0 < one["retryAfterMs"] <= 86_400_000 for one in refused), refused


@pytest.mark.proves("RESIL-05")
async def test_a_service_that_says_not_now_at_one_node_is_left_alone_by_all(nodes: Nodes) -> None:
    async with client() as web:

        async def track(node: Node, name: str) -> tuple[int, Any]:
            return await nodes.call(web, node, "track", name, secrets.token_hex(8))

        assert [(await track(node, "a"))[0] for node in nodes.running] == [200] * NODES
        status, told = await track(nodes.running[0], "hasty")
        assert (status, told["error"]["error_code"], told["error"]["errorCode"]) == (429, "E3504", "RATE_LIMITED")

        async def left_alone(node: Node) -> bool:
            status, told = await track(node, "b")
            if status == 200:
                return False
            assert told["error"]["error_code"] == "E3504", told
            assert 3_000_000 < told["error"]["retryAfterMs"] <= 3_600_000
            return True

        await everywhere(nodes, left_alone, "the pause that the service asked for")
        asked = nodes.lines("tracked")
        assert [await left_alone(node) for node in nodes.running] == [True] * NODES
    assert nodes.lines("tracked") == asked, "nobody asks it"


@pytest.mark.proves("OPS-07")
async def test_redis_that_crashes_is_filled_and_flushed_under_load_changes_nothing(nodes: Nodes) -> None:
    names = [f"flushed-{number}" for number in range(KEYS // 4)]
    async with client() as web:
        await nodes.connected(web)
        token, over = nodes.issue("flushed"), asyncio.Event()
        used = await nodes.use_up(web, token)
        assert sum(status == 200 for status, _ in used) == LIMIT

        async def fail() -> None:
            while not over.is_set():
                await asyncio.to_thread(nodes.redis.restart)
                await asyncio.to_thread(nodes.redis.ask, "CONFIG", "SET", "maxmemory", "2mb")
                await asyncio.to_thread(nodes.redis.ask, "DEBUG", "POPULATE", "10000")
                await asyncio.to_thread(nodes.redis.ask, "FLUSHALL")

        async def post(node: Node, name: str) -> None:
            async def answered() -> bool:
                status, told = await nodes.call(web, node, "post", name, name)
                assert status == 200 or told["error"]["error_code"] == "E3408", told  # it runs elsewhere, for long
                return status == 200

            await until(answered)

        failing = asyncio.create_task(fail())
        await asyncio.gather(*(post(node, name) for name in names for node in nodes.running))
        over.set()
        await failing
        await nodes.connected(web)
        limited = await nodes.use_up(web, token)
    made = Counter(nodes.lines("entries"))
    assert [made[name] for name in names] == [1] * len(names)
    assert {told["error"]["error_code"] for _, told in limited} == {"E3003"}, "a flush frees nothing"
    # After all of this there is nothing to lose: no key is kept there.
    assert await asyncio.to_thread(nodes.redis.ask, "DBSIZE") == "0"


BREAKING = """
import asyncio, sys
from interlock import Interlock
from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.errors import Failure

async def main() -> None:
    config = CircuitBreakerConfig.model_validate({"timeout_seconds": 3600})
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        services = app.gateway.services
        while app.messages.condition != "healthy":
            await asyncio.sleep(0.01)
        entries = [services.enter("bank", config) for _ in range(5)]
        print("ready", flush=True)
        sys.stdin.readline()
        for entry in entries:
            entry.done(Failure("E3502"))
        await services.settle()
        try:
            services.enter("bank", config)
        except Failure as failure:
            print(failure.code)

asyncio.run(main())
"""


@pytest.mark.proves("RESIL-03")
async def test_a_breaker_that_three_nodes_open_together_is_told_once_and_stays_open(
    nodes: Nodes, tmp_path: Path
) -> None:
    config = CircuitBreakerConfig.model_validate({})

    async def refused(app: Interlock) -> bool:
        try:
            app.gateway.services.enter("bank", config).abandoned()
        except Failure as failure:
            return failure.code == "E3501"
        return False

    with nodes.redis.heard("cb:state:changes") as messages:
        async with fourth_node(nodes, tmp_path / "home") as fourth:
            assert not await refused(fourth)
            assert await asyncio.to_thread(_break, nodes) == ["E3501"] * NODES
            await until(lambda: refused(fourth), "the breaker at a node at which nothing failed")
        await asyncio.to_thread(nodes.redis.ask, "PUBLISH", "cb:state:changes", "that is all")
        told = [await asyncio.to_thread(next, messages) for _ in range(2)]
        assert told == ["bank:closed->open", "that is all"]
    async with Interlock.open(tmp_path / "home", store=nodes.address, housekeeping=False) as fourth:
        assert await refused(fourth), "a restart keeps it open"
        rows = fourth.journal.reader.all("SELECT body FROM journal WHERE kind = 'registry' AND call = 'bank'")
    assert [(one["from"], one["to"]) for one in (json.loads(body) for (body,) in rows)] == [("closed", "open")]


@pytest.mark.proves("RESIL-03")
async def test_a_breaker_that_opens_at_one_node_is_open_at_three_others(nodes: Nodes, tmp_path: Path) -> None:
    config = CircuitBreakerConfig.model_validate({"timeout_seconds": 3600})
    async with AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(fourth_node(nodes, tmp_path / str(number))) for number in range(NODES + 1)
        ]

        async def fail(number: int) -> float:
            service = f"shop{number}"

            async def refused(app: Interlock) -> bool:
                await app.journal.changes.caught_up()
                try:
                    app.gateway.services.enter(service, config).abandoned()
                except Failure as failure:
                    return failure.code == "E3501"
                return False

            services = first.gateway.services
            assert [await refused(one) for one in others] == [False] * NODES
            for entry in [services.enter(service, config) for _ in range(config.failure_threshold)]:
                entry.done(Failure("E3502"))
            await services.settle()
            return max(await asyncio.gather(*(lag_of(partial(refused, one), "the breaker") for one in others)))

        await within_a_second(fail)


def _break(nodes: Nodes) -> list[str]:
    """Let a service fail on all data directories at once. Returns how the next call of each process is refused."""
    programs = [
        subprocess.Popen(
            [*forked.python(), "-c", BREAKING, str(node.cli.home)],
            env=node.cli.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for node in nodes.running
    ]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    return [program.communicate(timeout=PATIENCE_S)[0].strip() for program in programs]


async def test_calls_of_a_node_that_is_killed_are_reported_by_another(nodes: Nodes) -> None:
    first = nodes.running[0]
    victim = Cli(nodes.place / "killed", {"INTERLOCK_STORE": nodes.address})
    shutil.copytree(first.cli.home, victim.home, ignore=NOT_COPIED)
    with _started(victim) as last:
        await _killed(nodes, first, last)
    for cli in (victim, *(node.cli for node in nodes.running)):
        verified = await asyncio.to_thread(cli, "audit", "verify")
        assert verified.code == 0, verified.out + verified.err


async def _killed(nodes: Nodes, first: Node, last: Node) -> None:
    names = [f"killed-{number}" for number in range(30)]
    async with client() as web:
        hanging = asyncio.ensure_future(nodes.call(web, last, "hang", "killed", "killed"))

        async def hung() -> bool:
            return nodes.lines("hung") == ["killed"]

        await until(hung, "a call that hangs")
        posts = [asyncio.ensure_future(nodes.call(web, last, "post", name, name)) for name in names]
        await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        os.kill(last.process.pid, signal.SIGKILL)
        ended = await asyncio.gather(hanging, *posts, return_exceptions=True)
        assert isinstance(ended[0], httpx.HTTPError)
        answers = [one for one in ended[1:] if not isinstance(one, BaseException)]
        acknowledged = [told["result"] for status, told in answers if status == 200]
        with closing(psycopg.connect(nodes.address, autocommit=True)) as connection:  # 15 seconds later
            connection.execute(
                "UPDATE instance SET until_ms = 1 WHERE position(%s IN convert_from(report, 'UTF8')) > 0",
                (f'"{last.cli.home}"',),
            )

        async def reported() -> bool:
            unknown = await asyncio.to_thread(first.cli.ask, "calls", "reconcile")
            return "nodes.hang" in json.dumps(unknown)

        await until(reported, "the calls of the node that was killed")
        again = await asyncio.gather(*(nodes.call(web, first, "post", name, name) for name in names))
    made = Counter(nodes.lines("entries"))
    assert all(made[name] == 1 for name in acknowledged)
    assert all(made[name] <= 1 for name in names)
    # What was not refused as unknown was replayed or is made now, once.
    assert all(made[name] == 1 for name, (status, _) in zip(names, again, strict=True) if status == 200)
