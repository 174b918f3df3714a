"""Required permissions: each family is enforced, and a tool gets nothing that it does not list."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from interlock import Context, Effect, Failure, Field, Interlock, Preview, Sandboxing, tool
from interlock.contract import permissions
from interlock.contract.contract import Contract, contract_of
from interlock.contract.manifest import parse_manifest
from interlock.contract.permissions import Permission, permissions_of
from interlock.data.schema import Json
from interlock.executors import egress
from interlock.executors.egress import EgressPolicy
from interlock.gateway import token_checks
from interlock.registry.source import load
from tests.support import isolated_tools as cell
from tests.support.calls import admit, code, records
from tests.support.capabilities import Where, bound_to
from tests.support.hosts import upstream as host
from tests.support.programs import manifest, written

__all__ = ["host"]

LEFT = (
    "in-process tools share the server's process: their network, what they read, changes that are not watched, and"
    " credentials in its memory are not held to the list"
)


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as opened:
        yield opened


# Files


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_a_sandboxed_tool_sees_the_directory_that_it_lists_and_not_the_one_beside_it(
    app: Interlock, tmp_path: Path
) -> None:
    for name in ("listed", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    for tool_id, name in (("inside", "listed"), ("outside", "beside")):
        program = manifest(
            tool_id, ["cat", f"/in{tmp_path}/{name}/file"], sandbox={},
            required_permissions=[f"filesystem:read:{tmp_path}/listed"],
        )  # fmt: skip
        _, (one,) = load(written(tmp_path / f"{tool_id}.json", program))
        assert one.manifest.tier == 1
        await admit(app, one)
    assert (await app.call("prog.inside")).unwrap() == "listed"
    assert code(await app.call("prog.outside")) == "E3401"


async def test_a_sandboxed_tool_that_lists_no_file_sees_none(app: Interlock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("there")
    _, (one,) = load(written(tmp_path / "none.json", manifest("none", ["cat", f"/in{tmp_path}/file"], sandbox={})))
    await admit(app, one)
    assert code(await app.call("prog.none")) == "E3401"


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_a_path_in_the_arguments_lies_where_the_tool_lists_it(app: Interlock, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("a")
    (tmp_path / "secret").write_text("no")
    (data / "link").symlink_to(tmp_path / "secret")
    ran: list[str] = []

    @tool(
        version="1.0.0", mutation_class="read_only", namespace="perm", timeout_class="interactive", external_io=False,
        permissions=[f"filesystem:read:{data}"],
    )  # fmt: skip
    async def peek(path: Where) -> str:
        """Read a file of the data directory."""
        ran.append(path)
        return Path(path).read_text()  # noqa: ASYNC240 - a small file

    await admit(app, peek)
    assert (await app.call("perm.peek", path=str(data / "a"))).unwrap() == "a"
    ran.clear()
    for outside in ("/etc/passwd", f"{data}/../secret", f"{data}/link", f"{tmp_path}/data2/x", f"file://{tmp_path}/x"):
        assert code(await app.call("perm.peek", path=outside)) == "E3206", outside
    assert ran == []


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@pytest.mark.parametrize(("mode", "expected"), [("write", None), ("read", "E3206")])
async def test_a_tool_writes_only_below_a_path_that_it_lists_for_writing(
    app: Interlock, tmp_path: Path, mode: str, expected: str | None
) -> None:
    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="perm",
        effects=[Effect("file:{path}", "UPDATE")], permissions=[f"filesystem:{mode}:{tmp_path}"],
    )  # fmt: skip
    async def change(ctx: Context, path: Where) -> str:
        """Change a file."""
        ctx.effect(f"file:{path}", "UPDATE")
        return path

    @change.preview
    def _(path: str) -> Preview:
        return Preview(impact=path)

    await admit(app, change)
    result = await app.call("perm.change", path=str(tmp_path / "a"), dry_run=True)
    assert code(result) == expected


@pytest.fixture
def shop() -> Iterator[Path]:
    """A directory outside /tmp, which every sandbox has to itself."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        place = Path(directory).resolve() / "shop"
        place.mkdir()
        yield place


def _keep(shop: Path) -> Json:
    """A sandboxed program that writes a file of the shop."""
    return manifest(
        "keep", ["sh", "-c", 'printf kept > "$1" && printf kept', "sh", "{path}"], sandbox={}, namespace="perm",
        parameters={"path": {"type": "string", "format": "path", "description": "a file", "examples": ["/srv/a"]}},
        mutation_class="write_irreversible", effects=[{"resource": "file:{path}", "operation": "CREATE"}],
        required_permissions=[f"filesystem:write:{shop}"],
    )  # fmt: skip


async def _approved(app: Interlock, name: str, key: str, **said: Any) -> Any:
    """A call that somebody approves, and its result."""
    pending = await app.call(name, key=key, **said)
    if "pending" not in pending.metadata:
        return pending
    reviewer = replace(app.caller, id="local:reviewer", groups=frozenset({"approvers"}))
    await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=reviewer)
    return await app.call(name, key=key, **said)


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_a_sandboxed_tool_writes_to_the_directory_that_it_lists_and_its_changes_are_seen(
    tmp_path: Path, shop: Path
) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False, watched_files=(shop,)) as app:
        _, (one,) = load(written(tmp_path / "keep.json", _keep(shop)))
        assert one.manifest.tier == 1
        await admit(app, one)
        result = await _approved(app, "perm.keep", "1", path=f"{shop}/a")
        assert result.unwrap() == "kept"
        assert (shop / "a").read_text() == "kept"
        assert ((shop / "a").stat().st_uid, (shop / "a").stat().st_gid) == (os.getuid(), os.getgid())
        changed = [(one["affectedResource"], one["mutationType"]) for one in records(app, kind="mutation")]
        assert changed == [(f"file:{shop}/a", "CREATE")]
        for outside in (f"{shop}/../b", f"/in{shop}/b", "/srv/b"):
            assert code(await app.call("perm.keep", key=outside, path=outside)) == "E3206", outside


async def test_an_undeclared_change_in_a_writable_directory_is_put_back(tmp_path: Path, shop: Path) -> None:
    (shop / "price").write_text("1")
    async with Interlock.open(tmp_path / "home", housekeeping=False, watched_files=(shop,)) as app:
        program = _keep(shop)
        program["execution"]["argv"] = ["sh", "-c", f'printf 2 > {shop}/price; printf kept > "$1"', "sh", "{path}"]
        _, (one,) = load(written(tmp_path / "keep.json", program))
        await admit(app, one)
        assert code(await _approved(app, "perm.keep", "1", path=f"{shop}/a")) == "E3417"
    assert (shop / "price").read_text() == "1"


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_a_token_that_does_not_cover_a_writable_directory_is_refused_before_anything_is_mounted(
    app: Interlock, tmp_path: Path, shop: Path
) -> None:
    _, (one,) = load(written(tmp_path / "keep.json", _keep(shop)))
    await admit(app, one)
    caller = replace(app.caller, capability=bound_to(f"file:{shop}/a"))
    refused = await app.call("perm.keep", key="1", path=f"{shop}/a", caller=caller)
    assert (code(refused), "the token does not cover it" in str(refused.error)) == ("E3206", True)
    assert os.listdir(shop) == []


async def test_the_home_is_mounted_for_no_tool(tmp_path: Path, shop: Path) -> None:
    peek = manifest("peek", ["cat", f"/in{shop}/home/x"], sandbox={}, required_permissions=[f"filesystem:read:{shop}"])
    async with Interlock.open(shop / "home", housekeeping=False) as app:
        for one in load(written(tmp_path / "tools.json", peek, _keep(shop)))[1]:
            await admit(app, one)
        for result in (await app.call("prog.peek"), await _approved(app, "perm.keep", "1", path=f"{shop}/home/x")):
            assert (code(result), "the data directory of Interlock" in str(result.error)) == ("E3405", True)
    assert not (shop / "home" / "x").exists()


# Networks


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_a_sandboxed_tool_reaches_the_host_and_port_that_it_lists_and_no_other(
    tmp_path: Path, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one thing a test on one machine cannot have: a public address. Everything else is as it is.
    monkeypatch.setattr(egress, "EgressPolicy", partial(EgressPolicy, allow_private=True))
    everywhere = {"allowed_domains": ["localhost", "elsewhere.test"], "allowed_ports": [host, 1]}
    async with Interlock.open(tmp_path / "home", housekeeping=False, egress=everywhere) as app:
        declare = tool(
            version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(), timeout_s=60,
            permissions=[f"network:http://localhost:{host}", "network:http://elsewhere.test:1"],
        )  # fmt: skip
        await admit(app, declare(cell.fetch.function))
        assert (await app.call("cell.fetch", url=f"http://localhost:{host}/")).unwrap() == "200 hello"
        # Each host is listed with its own port.
        for url in ("http://localhost:1/", f"http://elsewhere.test:{host}/", f"http://127.0.0.1:{host}/"):
            assert code(await app.call("cell.fetch", url=url)) == "E3406", url


# Databases


def _put(path: Path, *listed: str) -> Any:
    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="perm", permissions=listed,
        effects=[Effect("database:shop/*", "CREATE")],
    )  # fmt: skip
    async def put(ctx: Context, n: Annotated[int, Field(description="a row", examples=[1])]) -> int:
        """Put a row into the shop's database."""
        with sqlite3.connect(path) as connection:
            connection.execute("INSERT INTO t VALUES (?)", (n,))
        connection.close()
        return n

    @put.preview
    def _(n: int) -> Preview:
        return Preview(impact=str(n))

    return put


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (("database:sqlite:write",), None),
        (("database:sqlite:read",), "E3417"),
        ((), "E3417"),
        (("database:mysql:write",), "E3417"),
    ],
)
async def test_a_watched_database_changes_only_for_a_tool_that_lists_writing_to_its_engine(
    tmp_path: Path, listed: tuple[str, ...], expected: str | None
) -> None:
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (n)")
    connection.close()
    home = tmp_path / "home"
    async with Interlock.open(home, housekeeping=False, watched_databases=(path,)) as app:
        await app.secrets.set("database/mysql/write", "a-password", by="local:test")
        await admit(app, _put(path, *listed))
        request = partial(app.call, "perm.put", n=1, key="1")
        pending = await request()
        await app.approvals.approve(
            pending.metadata["pending"]["ticketId"],
            by=replace(app.caller, id="local:reviewer", groups=frozenset({"approvers"})),
        )
        result = await request()
        assert code(result) == expected
        with sqlite3.connect(path) as connection:
            rows = connection.execute("SELECT n FROM t").fetchall()
        connection.close()
        assert rows == ([] if expected else [(1,)]), "what was not listed is put back"


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_a_database_permission_lends_the_credential_of_its_engine_and_mode(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="perm", permissions=["database:postgres:read"])
    async def ask(ctx: Context, name: Annotated[str, Field(description="a secret", examples=["x"])]) -> int:
        """Use the database's credential."""
        return len(ctx.secret(name))

    await admit(app, ask)
    assert code(await app.call("perm.ask", name="database/postgres/read")) == "E3602", "nobody has stored one"
    for mode in ("read", "write"):
        await app.secrets.set(f"database/postgres/{mode}", "a-password", by="local:test")
    assert (await app.call("perm.ask", name="database/postgres/read")).unwrap() == 10
    assert code(await app.call("perm.ask", name="database/postgres/write")) == "E3206"


# Credentials


@pytest.mark.shows("Python function", "credentials")
@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@pytest.mark.parametrize("family", ["credential", "credentials"])
async def test_a_tool_is_lent_the_credential_that_it_lists_and_no_other(app: Interlock, family: str) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="perm", permissions=[f"{family}:bank/token"])
    async def spend(ctx: Context, name: Annotated[str, Field(description="a secret", examples=["x"])]) -> int:
        """Use a credential."""
        return len(ctx.secret(name))

    await admit(app, spend)
    for name in ("bank/token", "bank/other"):
        await app.secrets.set(name, "a-secret-value", by="local:test")
    assert (await app.call("perm.spend", name="bank/token")).unwrap() == 14
    assert code(await app.call("perm.spend", name="bank/other")) == "E3206"


# Tokens

EACH = [
    ("filesystem:read:/srv/data", "file:/srv/data/*", "file:/srv/other/*"),
    ("filesystem:write:/srv/data", "file:/srv/*", "file:/srv/data"),
    ("network:https://api.example.com", "host:api.example.com:443", "host:api.example.com:80"),
    ("database:postgres:read", "database:postgres:write", "database:mysql:*"),
    ("database:postgres:write", "database:postgres:*", "database:postgres:read"),
    ("credential:bank/token", "credential:bank/*", "credential:shop/*"),
]


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@pytest.mark.parametrize(("listed", "covers", "misses"), EACH)
async def test_a_token_that_does_not_cover_a_listed_permission_is_refused_before_anything_runs(
    app: Interlock, listed: str, covers: str, misses: str
) -> None:
    ran: list[str] = []

    @tool(version="1.0.0", mutation_class="read_only", namespace="perm", permissions=[listed])
    async def use(url: Annotated[str, Field(description="an address", examples=["https://a.example/"])]) -> str:
        """Use what it lists."""
        ran.append(url)
        return url

    await admit(app, use)
    for name in ("database/postgres/read", "database/postgres/write", "bank/token"):
        await app.secrets.set(name, "a-secret-value", by="local:test")
    url = "https://a.example/"
    refused = await app.call("perm.use", url=url, caller=replace(app.caller, capability=bound_to(url, misses)))
    assert code(refused) == "E3206"
    assert "the token does not cover it" in str(refused.error)
    assert ran == []
    assert [record["phases"][-2:] for record in records(app)] == [["authorize", "return"]]
    allowed = await app.call("perm.use", url=url, caller=replace(app.caller, capability=bound_to(url, covers)))
    assert allowed.unwrap() == url


def _contract(*listed: str) -> Contract:
    document = manifest("one", ["true"], sandbox={}, required_permissions=list(listed))
    return contract_of(parse_manifest(document))


SEGMENTS = st.sampled_from(["a", "b", "ab"])
PATHS = st.lists(SEGMENTS, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
LISTED = st.one_of(
    st.builds("filesystem:{}:{}".format, st.sampled_from(["read", "write"]), PATHS),
    st.builds("network:https://{}:{}".format, SEGMENTS, st.sampled_from([443, 444])),
    st.builds("database:{}:{}".format, SEGMENTS, st.sampled_from(["read", "write"])),
    st.builds("credential:{}".format, PATHS.map(lambda path: path[1:])),
)
NAMED = st.one_of(
    PATHS.map("file:{}/*".format), st.builds("host:{}:{}".format, SEGMENTS, st.sampled_from(["443", "*"])),
    st.builds("database:{}:{}".format, SEGMENTS, st.sampled_from(["read", "write", "*"])),
    PATHS.map(lambda path: f"credential:{path[1:]}*"), st.sampled_from(["file:*", "host:*", "credential:*"]),
)  # fmt: skip


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@given(listed=st.lists(LISTED, max_size=4), named=st.lists(NAMED, max_size=5))
def test_what_a_call_may_use_is_part_of_what_its_tool_lists_and_of_what_its_token_covers(
    listed: list[str], named: list[str]
) -> None:
    given_ = permissions_of(listed)
    said = [permissions.read(one) for one in listed]
    # Of the tool: nothing is given that is not listed, and nothing that is listed is lost.
    assert all(any(one.includes(use) for one in said) for use in given_.listed)
    assert all(any(use.includes(one) for use in given_.listed) for one in said)
    token = bound_to(*named)
    try:
        token_checks.check_permissions(token, _contract(*listed))
    except Failure:
        return
    # Of the token: every file, host, database and credential that the call gets.
    for path in given_.readable:
        assert token.covers_resource(f"file:{path}/x")
    for address, port in given_.hosts:
        assert token.covers_resource(f"host:{address}:{port}")
    for engine, mode in given_.databases.items():
        assert token.covers_resource(f"database:{engine}:{mode}") or mode == "read"
    for name in given_.credentials:
        assert name.startswith("database/") or token.covers_resource(f"credential:{name}")


# Admission


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@pytest.mark.parametrize(
    "listed",
    [
        "files:read", "fs:read:/srv", "vault:open", "filesystem:read", "filesystem:append:/srv", "filesystem:read:srv",
        "filesystem:read:/", "filesystem:read:/srv/../etc", "filesystem:read:/srv/*", "network:api.example.com",
        "network:https://api.example.com/v1", "network:https://user@api.example.com", "network:gopher://a.example",
        "network:https://a b", "database:postgres", "database:postgres:admin", "database::read",
    ],
)  # fmt: skip
async def test_a_permission_that_means_nothing_is_refused_at_admission(app: Interlock, listed: str) -> None:
    declare = tool(version="1.0.0", mutation_class="read_only", namespace="perm", permissions=[listed])
    with pytest.raises(Failure) as refused:
        await app.add(declare(same_number))
    assert refused.value.code == "E3105"
    # No failure shows the part of an address that may be a credential.
    assert listed.replace("user@", "[REDACTED]@") in refused.value.message or " " in listed


async def same_number(n: Annotated[int, Field(description="a number", examples=[1])]) -> int:
    """Give a number back."""
    return n


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"required_permissions": ["network:https://a.example"], "network_policy": {"deny_all_egress": True}},
            "denies",
        ),
        (
            {
                "required_permissions": ["network:https://a.example"],
                "network_policy": {"allowed_domains": ["b.example"]},
            },
            "network_policy does not allow it",
        ),
        ({"required_permissions": ["filesystem:write:/srv"]}, "the tool is read_only"),
        ({"required_permissions": ["filesystem:write:/tmp/x"]}, "a sandbox, which has its own /tmp"),
        ({"required_permissions": ["filesystem:write:/usr/share/x"]}, "a sandbox, which has its own /usr"),
        ({"required_permissions": ["filesystem:read:/srv/x"], "sandbox": {"reads": {"srv": "/etc/hosts"}}}, "rename"),
    ],
)
async def test_permissions_that_cannot_be_enforced_as_written_are_refused_at_admission(
    app: Interlock, tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    said.setdefault("sandbox", {})
    (offered,) = await app.add_from(str(written(tmp_path / "one.json", manifest("one", ["true"], **said))))
    assert not offered.admitted
    assert words in str(offered.verdict.failure("it"))


@pytest.mark.part_of("CONTRACT-21", rest=LEFT)
async def test_overlapping_permissions_are_admitted_once_and_the_author_hears_of_it(
    app: Interlock, tmp_path: Path
) -> None:
    overlapping = [
        f"filesystem:read:{tmp_path}", f"filesystem:read:{tmp_path}/data", "credential:a", "credentials:a",
        "database:mysql:read", "database:mysql:write",
    ]  # fmt: skip
    declare = tool(version="1.0.0", mutation_class="read_only", namespace="perm", permissions=overlapping)
    await app.secrets.set("a", "a-secret-value", by="local:test")
    await app.secrets.set("database/mysql/write", "a-secret-value", by="local:test")
    (offered,) = await app.add(declare(same_number))
    for words in ("/data` is part of", "`credentials:a` is part of", ":read` is part of", "no watcher sees"):
        assert any(words in one for one in offered.verdict.warnings), words
    held = permissions_of(overlapping)
    assert held.listed == (
        Permission("filesystem", str(tmp_path)),
        Permission("credential", "a"),
        Permission("database", "mysql", "write"),
    )
    assert held.credentials == ("a", "database/mysql/write")
