"""Names: one tool per address, aliases that collide with nothing, and versions found through the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Context, Field, Interlock, Tool, tool
from interlock.api.tools import Tools
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.capability import ToolGrant
from interlock.contract.manifest import parse_manifest
from interlock.contract.manifest_tools import from_manifest
from interlock.core.errors import Failure


def named(namespace: str, tool_id: str, *aliases: str, version: str = "1.0.0") -> Tool[..., Any]:
    """A tool that answers with its own address."""
    manifest = parse_manifest(
        {
            "tool_id": tool_id,
            "namespace": namespace,
            "version": version,
            "name": "Answer",
            "description": "Answers with its own address.",
            "provider": "local",
            "protocol": "native",
            "parameters": {"type": "object", "properties": {}},
            "result_schema": {"type": "string"},
            "required_permissions": [],
            "timeout_class": "interactive",
            "idempotency": {},
            "mutation_class": "read_only",
            "observability": {},
            "aliases": list(aliases),
        }
    )
    return from_manifest(manifest, lambda: f"{namespace}.{tool_id}", {})


def which(version: str) -> Tool[..., Any]:
    """A tool that answers with its own version."""
    manifest = named("demo", "which", version=version).manifest
    return from_manifest(manifest, lambda: version, {})


async def refused(app: Interlock, candidate: Tool[..., Any]) -> Failure:
    before = await app.catalog.rows(), app.journal.reader.all("SELECT * FROM tool_alias")
    with pytest.raises(Failure) as caught:
        await app.add(candidate)
    assert before == (await app.catalog.rows(), app.journal.reader.all("SELECT * FROM tool_alias"))
    return caught.value


@pytest.mark.proves("REG-02")
async def test_two_namespaces_may_both_offer_search(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(named("mail", "search"), named("files", "search"))
        for namespace in ("mail", "files"):
            assert (await app.call(f"{namespace}.search")).unwrap() == f"{namespace}.search"


@pytest.mark.proves("REG-02")
async def test_an_ambiguous_bare_name_is_refused_with_its_candidates(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(named("mail", "search"), named("files", "search"), named("web", "find_pages", "search"))
        error = (await app.call("search")).error
        assert error is not None
        assert error.code == "E3101"
        assert error.details == {"candidates": ["files.search", "mail.search", "web.find_pages"]}
        for candidate in ("files.search", "mail.search", "web.find_pages"):
            assert f"`{candidate}`" in error.message


@pytest.mark.proves("REG-02")
async def test_a_bare_name_or_alias_that_means_one_tool_finds_it(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(named("mail", "search_mail", "find_mail"), named("files", "search_files"))
        for name in ("search_mail", "find_mail", "mail.find_mail", "mail.search_mail"):
            assert (await app.call(name)).unwrap() == "mail.search_mail"
        # The wildcard characters of the store's language mean nothing in a name.
        for name in ("search%", "search____l", "%", "mail.%", "files.find_mail"):
            error = (await app.call(name)).error
            assert error is not None
            assert error.code == "E3101"


async def test_a_name_is_the_same_name_only_in_the_same_case(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(named("mail", "search"))
        for name in ("mail.SEARCH", "SEARCH"):
            error = (await app.call(name)).error
            assert error is not None
            assert error.code == "E3101"


@pytest.mark.proves("REG-02")
@pytest.mark.parametrize(
    "candidate",
    [
        named("mail", "lookup", "find_mail"),  # an alias that another tool has
        named("mail", "lookup", "search"),  # an alias that is another tool's name
        named("mail", "find_mail"),  # a name that is another tool's alias
    ],
    ids=["alias on alias", "alias on name", "name on alias"],
)
async def test_a_name_that_would_collide_inside_a_namespace_is_refused(
    tmp_path: Path, candidate: Tool[..., Any]
) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(named("mail", "search", "find_mail"))
        failure = await refused(app, candidate)
        assert failure.code == "E3103"
        assert "mail.search" in failure.message
        # The same names in another namespace collide with nothing.
        manifest = candidate.manifest
        await app.add(named("files", manifest.tool_id, *manifest.aliases))


@pytest.mark.proves("REG-02")
async def test_versions_of_one_tool_share_their_alias(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(named("mail", "search", "find_mail"), named("mail", "search", "find_mail", version="1.0.1"))
        assert (await app.call("mail.find_mail")).tool == "mail.search@1.0.1"


# Versions through the catalog

PART_OF_04 = pytest.mark.part_of("REG-04", rest="the pin of a composite, of which there are none yet")


async def add_seed(app: Interlock) -> None:
    # Not in order: the answer is the highest, whatever was published last.
    for version in ("2.0.0", "1.0.0", "1.2.0", "1.1.0"):
        await app.add(named("demo", "answer", version=version))


@PART_OF_04
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("^1.0.0", "1.2.0"),
        ("~1.1.0", "1.1.0"),
        ("1.x", "1.2.0"),
        ("1.0.0", "1.0.0"),
        ("*", "2.0.0"),
        ("LATEST", "2.0.0"),
        (None, "2.0.0"),
    ],
)
async def test_a_spec_finds_the_highest_match(tmp_path: Path, spec: str | None, expected: str) -> None:
    async with Interlock.open(tmp_path) as app:
        await add_seed(app)
        assert (await app.call("demo.answer", version=spec)).tool == f"demo.answer@{expected}"
        if spec is not None:
            assert (await app.call(f"demo.answer@{spec}")).tool == f"demo.answer@{expected}"


@PART_OF_04
async def test_unknown_tools_versions_and_ranges_each_have_their_error(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await add_seed(app)
        for name, spec, code in (
            ("demo.answr", None, "E3101"),
            ("answr", "^1.0.0", "E3101"),
            ("demo.answer", "3.x", "E3102"),
            ("demo.answer", "=1.0.5", "E3102"),
            ("demo.answer", "one", "E3004"),
        ):
            error = (await app.call(name, version=spec)).error
            assert error is not None
            assert error.code == code
        unknown = (await app.call("demo.answr")).error
        assert unknown is not None
        assert "`demo.answer`" in unknown.message


AGENTS = [make_did_key(make_private("EdDSA").public_key()) for _ in range(3)]


async def token_for(app: Interlock, *ranges: str, tool: str = "demo.answer") -> str:
    """A token whose links allow one tool, each in a range of versions; all but the first are delegated."""
    if await app.identities.find(AGENTS[0]) is None:
        for agent in AGENTS:
            await app.identities.register(Identity(did=agent, trust=90), by="test")
        app.issuer_keys.init("EdDSA")
    first, *others = ([ToolGrant(tool, within)] for within in ranges)
    token = await app.tokens.issue(subject=AGENTS[0], by=app.caller, tools=first)
    for agent, narrower in zip(AGENTS[1:], others, strict=False):
        token = await app.tokens.delegate(token, subject=agent, by=app.caller, tools=narrower)
    return token


@PART_OF_04
@pytest.mark.parametrize(
    ("ranges", "spec", "expected"),
    [
        (("*",), None, "2.0.0"),
        (("^1.0.0",), None, "1.2.0"),
        (("^1.0.0",), "LATEST", "1.2.0"),
        (("^1.0.0",), "<1.2.0", "1.1.0"),
        (("*", "<2.0.0", "<1.2.0"), None, "1.1.0"),
        (("*", "^1.0.0"), "1.x", "1.2.0"),
        (("^1.0.0",), "2.x", "E3103"),
        (("^1.0.0", "1.1.0"), ">1.1.0", "E3103"),
        (("^3.0.0",), None, "E3103"),
        # Asked for to the letter, it is the token that is refused.
        (("^1.0.0",), "2.0.0", "E3204"),
    ],
)
async def test_ranges_of_request_and_token_meet_in_the_highest_common_version(
    tmp_path: Path, ranges: tuple[str, ...], spec: str | None, expected: str
) -> None:
    async with Interlock.open(tmp_path) as app:
        await add_seed(app)
        result = await app.call("demo.answer", version=spec, token=await token_for(app, *ranges))
        if result.error is None:
            assert result.tool == f"demo.answer@{expected}"
        else:
            assert result.error.code == expected


async def test_what_is_listed_is_what_the_token_calls(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await add_seed(app)
        await app.add(named("demo", "other"))
        caller = await app.caller_of(await token_for(app, "<1.2.0"))
        tools = Tools(app)
        assert [one.contract.ref for one in await tools.visible(caller)] == ["demo.answer@1.1.0"]
        assert (await tools.find("answer", "^1.0.0", caller)).contract.version == "1.1.0"


@PART_OF_04
async def test_a_range_below_a_call_meets_the_token_of_the_call_above(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def ask(ctx: Context, within: Annotated[str, Field(description="a range", examples=["*"])]) -> str:
        """Ask another tool in a range of versions, and say which it was or what was wrong."""
        try:
            return str(await ctx.call("demo.which", version=within))
        except Failure as failure:
            return failure.code

    async with Interlock.open(tmp_path) as app:
        for version in ("1.0.0", "1.1.0", "2.0.0"):
            await app.add(which(version))
        await app.add(ask)
        lower, other = await token_for(app, "<1.1.0", tool="demo.*"), await token_for(app, "^1.0.0", tool="demo.*")
        assert (await app.call("demo.ask", within="^1.0.0", token=lower)).unwrap() == "1.0.0"
        assert (await app.call("demo.ask", within="2.x", token=other)).unwrap() == "E3103"


@PART_OF_04
async def test_ranges_for_a_tool_that_does_not_exist_are_an_unknown_tool(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        token = await token_for(app, "^1.0.0", tool="demo.nothing")
        error = (await app.call("demo.nothing", version="1.x", token=token)).error
        assert error is not None
        assert error.code == "E3101"
