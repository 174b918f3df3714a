"""The gate of selections answers what the call itself would be answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Context, Effect, Field, Interlock, Preview, Result, Tool, tool
from interlock.api.selection_results import Selection
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.contract.manifest import Approval
from interlock.data.schema import Json
from interlock.registry import quarantine
from interlock.registry.retirement import deprecate, move
from tests.support.calls import admit, code, use_policy
from tests.support.capabilities import Where
from tests.support.identities import did_of
from tests.support.office import Value, opened
from tests.support.wires import BY_ID, wired

REQUEST = "an account at the bank"
PERMIT = '@id("all") permit (principal, action, resource);\n'


@tool(version="1.0.0", mutation_class="read_only", namespace="bank", external_io=False, estimated_cost=2.0)
async def dear(ctx: Context, value: Value) -> str:
    """Look at an account at the bank, for money."""
    ctx.cost(external_api=2.0)
    return value


@tool(version="1.0.0", mutation_class="read_only", namespace="bank", external_io=False)
async def listed(value: Value) -> str:
    """List the accounts at the bank."""
    return value


def _write(name: str, mutation_class: Any, **options: Any) -> Tool[..., Any]:
    async def function(account: Annotated[str, Field(description="the account", examples=["a1"])]) -> str:
        return account

    function.__name__, function.__doc__ = name, "Change an account at the bank."
    made: Tool[..., Any] = tool(
        version="1.0.0",
        mutation_class=mutation_class,
        namespace="bank",
        external_io=False,
        effects=[Effect("account:{account}", "UPDATE")],
        **options,
    )(function)

    def preview(**_: Any) -> Preview:
        return Preview()

    async def undo(**_: Any) -> None:
        return None

    made.preview(preview)
    if mutation_class == "write_reversible":
        made.compensate(undo)
    return made


def _reading(path: Path) -> Tool[..., Any]:
    @tool(
        version="1.0.0",
        mutation_class="read_only",
        namespace="bank",
        external_io=False,
        permissions=[f"filesystem:read:{path}"],
    )
    async def statement(path: Where) -> str:
        """Read the statement of an account at the bank."""
        return path

    return statement


async def _holder(app: Interlock, **bounds: Any) -> Caller:
    """A caller with a token."""
    if not app.issuer_keys.all():
        app.issuer_keys.init("EdDSA")
    if await app.identities.find(did_of("bot")) is None:
        await app.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
    grants = [ToolGrant("bank.*"), ToolGrant("office.*")]
    return await app.caller_of(await app.tokens.issue(subject=did_of("bot"), tools=grants, by=app.caller, **bounds))


async def _select(app: Interlock, name: str, parameters: Json, caller: Caller, **options: Any) -> Selection:
    async def selector(_: str, offered: Sequence[Json]) -> Json:
        assert name in [one["name"] for one in offered]
        return {"tool": name, "parameters": parameters}

    return await app.select(REQUEST, caller=caller, selector=selector, intent=False, **options)


async def _both(
    app: Interlock, name: str, parameters: Json, caller: Caller, **options: Any
) -> tuple[Selection, Result]:
    """The selection of a call, and that call. Asking the gate a second time changes nothing, so it uses nothing up."""
    made = await _select(app, name, parameters, caller, **options)
    assert made.verdict is not None
    assert (await _select(app, name, parameters, caller, **options)).verdict == made.verdict
    writes = name.rpartition(".")[2] in ("post", "wipe")
    result = await app.call(name, parameters, caller=caller, **({"key": "last"} if writes else {}), **options)
    answer = "ALLOW" if result.ok else "REQUIRE_APPROVAL" if result.pending else "DENY"
    assert made.verdict.answer == answer, (made.verdict, result.error)
    if result.error is not None and not result.pending:
        # The gate says why in the words of the refusal; a call adds which tool is not allowed.
        assert made.verdict.reason in result.error.message
    return made, result


COUNTED, ONCE = {"value": "x"}, {"max_uses": 1}
POSTED = {"account": "a1"}


@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize(
    ("name", "parameters", "bounds", "before", "refused"),
    [
        pytest.param("bank.dear", COUNTED, {"constraints": {"max_cost": 1.0}}, 0, ("E3210", "cost"), id="too dear"),
        pytest.param("bank.dear", COUNTED, {"constraints": {"max_cost": 2.0}}, 0, None, id="just enough"),
        pytest.param("bank.dear", COUNTED, {"constraints": {"max_cost": 3.0}}, 1, ("E3210", "cost"), id="spent"),
        pytest.param("bank.listed", COUNTED, {"constraints": ONCE}, 0, None, id="one use left"),
        pytest.param("bank.listed", COUNTED, {"constraints": ONCE}, 1, ("E3206", "authorization"), id="used up"),
        pytest.param("bank.post", POSTED, {"resources": ["account:a*"]}, 0, None, id="its resource"),
        pytest.param("bank.post", POSTED, {"resources": ["account:b*"]}, 0, ("E3206", "authorization"), id="another"),
        pytest.param(
            "bank.listed", COUNTED, {"resources": ["account:*"]}, 0, ("E3206", "authorization"), id="names none"
        ),
        pytest.param(
            "bank.post", POSTED, {"constraints": {"mutation_class": "write_reversible"}}, 0, None, id="its class"
        ),
        pytest.param("bank.listed", COUNTED, {"constraints": {"environments": ["local"]}}, 0, None, id="here"),
        pytest.param("bank.statement", {"path": "inside"}, {}, 0, None, id="its path"),
        pytest.param("bank.statement", {"path": "outside"}, {}, 0, ("E3206", "authorization"), id="another path"),
    ],
)
async def test_the_gate_denies_a_call_exactly_if_the_token_or_its_paths_do(
    home: Path, name: str, parameters: Json, bounds: Json, before: int, refused: tuple[str, str] | None
) -> None:
    async with opened(home) as app:
        await use_policy(app, PERMIT)
        await admit(app, dear, listed, _write("post", "write_reversible"), _reading(home / "inside"))
        await app.catalog.forget()
        if "path" in parameters:
            parameters = {"path": str(home / parameters["path"] / "file")}
        bot = await _holder(app, **bounds)
        for number in range(before):
            assert (await app.call(name, {"value": str(number)}, caller=bot)).ok
        made, result = await _both(app, name, parameters, bot)
        assert made.verdict is not None
        assert code(result) == (None if refused is None else refused[0])
        assert refused is None or made.verdict.check == refused[1]


@pytest.mark.parametrize(
    "constraints", [{"mutation_class": "read_only"}, {"environments": ["production"]}], ids=["class", "environment"]
)
async def test_a_tool_that_the_token_never_allows_is_not_allowed_by_the_gate(home: Path, constraints: Json) -> None:
    async with opened(home) as app:
        await use_policy(app, PERMIT)
        await admit(app, _write("post", "write_reversible"))
        await app.catalog.forget()
        bot = await _holder(app, constraints=constraints)
        assert code(await app.call("bank.post", POSTED, caller=bot, key="k")) == "E3206"
        made = await _select(app, "bank.post", POSTED, bot)
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("DENY", "authorization")


async def test_of_a_call_whose_arguments_are_not_chosen_yet_the_gate_asks_what_holds_for_every_call(home: Path) -> None:
    async with opened(home) as app:
        await use_policy(app, PERMIT)
        await admit(app, _write("post", "write_reversible"), _reading(home / "inside"))
        await app.catalog.forget()
        bot = await _holder(app, resources=["account:a*"])
        for caller, request, name in (
            (bot, "change an account at the bank", "bank.post"),
            (app.caller, "read the statement of an account", "bank.statement"),
        ):
            made = await app.select(request, caller=caller, intent=False)
            assert made.verdict is not None
            assert (made.chosen, made.parameters, made.verdict.answer) == (name, None, "ALLOW")
        for bounds in ({"mutation_class": "read_only"}, {"environments": ["production"]}):
            made = await app.select(
                "change an account at the bank", caller=await _holder(app, constraints=bounds), intent=False
            )
            assert made.verdict is not None
            assert (made.chosen, made.verdict.answer) == ("bank.post", "DENY")


@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize(
    ("rule", "limit", "answers"),
    [
        ("left < 5000000", 10.0, ["ALLOW", "ALLOW", "ALLOW", "DENY"]),
        ("left < 5000000", 4.0, ["DENY"]),
        ("spent > 2000000", 10.0, ["ALLOW", "ALLOW", "DENY"]),
        ("spent > 2000000", None, ["ALLOW", "ALLOW", "ALLOW"]),
    ],
)
async def test_a_rule_about_budgets_reads_the_same_at_the_gate_as_in_a_call(
    home: Path, rule: str, limit: float | None, answers: list[str]
) -> None:
    budgets: list[Json] = [] if limit is None else [{"per": "session", "limit": limit}]
    async with opened(home, budgets=budgets) as app:
        await use_policy(
            app, PERMIT + f'@id("thrift") forbid (principal, action, resource) when {{ context.budgets.{rule} }};\n'
        )
        await admit(app, dear)
        await app.catalog.forget()
        for place, expected in enumerate(answers):
            made, _ = await _both(app, "bank.dear", {"value": str(place)}, app.caller, session="monday")
            assert made.verdict is not None
            assert made.verdict.answer == expected, place
            if expected == "DENY":
                assert made.verdict.check == "authorization"
                assert "thrift" in made.verdict.reason
        if limit == 10.0:  # another session has spent nothing
            other, _ = await _both(app, "bank.dear", COUNTED, app.caller, session="tuesday")
            assert other.verdict is not None
            assert other.verdict.answer == "ALLOW"


@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize("own", [None, 77], ids=["the setting", "the tool's own"])
async def test_what_the_approval_gate_asks_of_a_person_the_gate_says_with_the_time_they_have(
    home: Path, own: int | None
) -> None:
    options: Json = {} if own is None else {"approval": Approval.model_validate({"timeout_seconds": own})}
    async with opened(home, approval={"timeout_seconds": 1234}) as app:
        await use_policy(app, PERMIT)
        await admit(app, _write("wipe", "write_irreversible", **options), _write("post", "write_reversible"))
        await app.catalog.forget()
        made, result = await _both(app, "bank.wipe", POSTED, app.caller)
        assert result.pending
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("REQUIRE_APPROVAL", "authorization")
        assert "write_irreversible" in made.verdict.reason
        ticket = await app.approvals.show(result.metadata["pending"]["ticketId"])
        assert made.verdict.timeout_s == (own or 1234) == (ticket.expires_ms - ticket.created_ms) // 1000
        # What nobody needs to approve has no such time.
        may, _ = await _both(app, "bank.post", POSTED, app.caller)
        assert may.verdict is not None
        assert (may.verdict.answer, may.verdict.timeout_s) == ("ALLOW", None)


@pytest.mark.proves("SURF-08")
async def test_what_a_session_has_spent_counts_for_its_selections_on_every_wire(home: Path) -> None:
    async with opened(home, budgets=[{"per": "session", "limit": 2.0}]) as app, wired(app) as wires:
        await use_policy(app, PERMIT)
        await admit(app, dear)
        await app.catalog.forget()
        bot = await app.caller_of(wires.tokens["full"])
        assert (await app.call("bank.dear", COUNTED, caller=bot, session="monday")).ok
        for wire in BY_ID:
            for session, answer in (("monday", "DENY"), ("tuesday", "ALLOW")):
                told = await wires.rows[wire].select(
                    "look at an account at the bank, for money", intent=False, session=session
                )
                assert told["chosen"] == "bank.dear"
                assert told["gate"]["answer"] == answer, (wire, session)
                assert answer == "ALLOW" or told["gate"]["check"] == "cost"


@pytest.mark.parametrize("how", ["quarantined", "retired"])
async def test_a_tool_that_is_taken_away_while_a_model_chooses_it_is_denied(home: Path, how: str) -> None:
    async with opened(home) as app:
        await use_policy(app, PERMIT)
        await admit(app, listed)
        await app.catalog.forget()
        version = await app.catalog.resolve("bank.listed")

        async def meanwhile(_: str, __: Sequence[Json]) -> Json:
            if how == "quarantined":
                await app.journal.commit(quarantine.impose(version.row.digest, version.contract.ref, "c", "it lied"))
                await app.gateway.quarantine.look()
            else:
                await app.journal.commit(deprecate("bank.listed", "1.0.0", by="ann"))
                await app.journal.commit(move("bank.listed", "1.0.0", "sunset", by="ann"))
                await app.catalog.forget()
            return {"tool": "bank.listed", "parameters": COUNTED}

        made = await app.select(REQUEST, selector=meanwhile, intent=False)
        assert made.verdict is not None
        assert (made.chosen, made.verdict.answer, made.verdict.check) == ("bank.listed", "DENY", "authorization")
        result = await app.call("bank.listed", COUNTED, version="1.0.0")
        assert result.error is not None
        assert result.error.message == made.verdict.reason
