"""`app.select`: a tool for a request, through every stage and the gate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from interlock import Context, Failure, Interlock, tool
from interlock.api.evaluating import evaluate
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.data.schema import Json
from interlock.selection.hierarchy import most_tools
from interlock.selection.router import Router, features
from interlock.testing import FakeClock
from tests.support.calls import admit, use_policy
from tests.support.identities import did_of
from tests.support.office import Value, opened, some_tool
from tests.support.upstream_servers import Answer as HttpAnswer
from tests.support.upstream_servers import Got, HttpServer, json_answer
from tests.support.wires import BY_ID, wired


def _stages(made: Any) -> dict[str, list[str]]:
    return {one.name: list(one.tools) for one in made.stages}


def _recorded(app: Interlock, made: Any) -> Json:
    """The record of a selection. It has what each stage left, its choice, and the answer of the gate."""
    (body,) = app.journal.reader.one("SELECT body FROM journal WHERE kind = 'selection' AND call = ?", (made.id,))
    record: Json = orjson.loads(body)
    assert record["chosen"] == made.chosen
    assert [one["stage"] for one in record["stages"]] == [one.name for one in made.stages]
    assert [(one["before"], one["after"]) for one in record["stages"]] == [
        (one.before, len(one.tools)) for one in made.stages
    ]
    kept = ("retrieval", "router", "rules", "allocation", "cost", "latency", "model")
    assert record["left"] == {stage: _stages(made)[stage][:10] for stage in kept}
    verdict = made.verdict
    gate = None if verdict is None else {"answer": verdict.answer, "check": verdict.check, "reason": verdict.reason}
    assert record["gate"] == gate
    return record


@pytest.mark.proves("SURF-07", "SURF-15")
async def test_a_request_gets_a_tool_with_what_every_stage_left(home: Path) -> None:
    async with opened(home) as app:
        await admit(app, some_tool("rain_report", f"How much rain falls. {'Written by hand. ' * 60}"))
        await app.catalog.forget()
        made = await app.select("will it rain in Rome tomorrow?")
        assert made.chosen == "office.forecast"
        sizes = {one.tool: one.tokens for one in made.candidates}
        assert sizes["office.rain_report"] > sizes["office.forecast"] + 60
        assert [one.name for one in made.stages] == [
            "intent", "hierarchy", "retrieval", "router", "rules", "allocation", "cost", "latency", "model",
        ]  # fmt: skip
        assert made.verdict is not None
        assert made.verdict.answer == "ALLOW"
        assert made.candidates[0].tokens > 0
        (body,) = app.journal.reader.one("SELECT body FROM journal WHERE kind = 'selection'")
        record: Json = orjson.loads(body)
        assert (record["chosen"], record["gate"]["answer"]) == ("office.forecast", "ALLOW")
        assert made.intent is not None
        assert record["intent"] == {"kind": made.intent.kind, "confidence": round(made.intent.confidence, 4)}
        assert _recorded(app, made) == record
        assert b"Rome" not in body
        (stored,) = app.journal.reader.one("SELECT body FROM payload WHERE call = ?", (made.id,))
        assert b"Rome" not in stored
        # Requests leave the quota to the results of their caller.
        assert sum(size for (size,) in app.journal.reader.all("SELECT bytes FROM payload_use")) == 0


@pytest.mark.proves("SURF-15")
async def test_chatter_gets_no_tool_and_requests_are_not_stored_if_that_is_set(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(home, selection_requests="never") as app:
        made = await app.select("thank you so much")
        assert (made.chosen, made.verdict) == (None, None)
        assert made.intent is not None
        assert made.intent.kind == "none"
        without = await app.select("thank you so much", intent=False)
        assert without.intent is None
        assert set(_stages(made)["intent"]) < set(_stages(without)["intent"])
        assert _recorded(app, made)["intent"] == {"kind": "none", "confidence": round(made.intent.confidence, 4)}
        assert _recorded(app, without)["intent"] is None
        # A verdict leaves a part of the tools, and no later stage adds another. Without one, all of them stay.
        every = set(_stages(without)["intent"])
        for text, kind in (
            ("list the weather of a city", "read"),
            ("send a mail to Bo", "communicate"),
            ("delete everything", "change"),
            ("invoice", None),
            ("20 miles in km", None),
        ):
            one = await app.select(text)
            assert one.intent is not None
            assert one.intent.kind == kind, text
            assert _recorded(app, one)["intent"] == {"kind": kind, "confidence": round(one.intent.confidence, 4)}
            left = set(_stages(one)["intent"])
            assert left == every if kind is None else set() < left < every
            assert one.stages[0].before == len(every)
            for stage in ("hierarchy", "retrieval", "router", "rules", "model"):
                assert set(_stages(one)[stage]) <= left, stage
        assert app.journal.reader.one("SELECT count(*) FROM payload") == (0,)
        # Nor does a router that prefers a tool which the verdict left out.
        read = await app.select("list the weather of a city")
        (other, *_) = every - set(_stages(read)["intent"])
        monkeypatch.setattr(app.selections.learning, "router", _scripted(other))
        routed = await app.select("list the weather of a city")
        assert routed.intent == read.intent
        assert other not in str(routed.document()["candidates"])
        assert (await app.select("list the weather of a city", intent=False)).chosen == other


@pytest.mark.proves("SURF-15")
async def test_a_rule_brings_back_no_tool_that_the_verdict_has_left_out(home: Path) -> None:
    request = "list the weather of a city"
    async with opened(home) as app:
        every = {one.row.address for one in await app.tools.visible(app.caller)}
        made = await app.select(request)
        left = set(_stages(made)["intent"])
        out, inside = min(every - left), min(left - {made.chosen})
    rules = ({"tool": out, "words": ["weather"]}, {"tool": inside, "words": ["city"]})
    async with Interlock.open(home, housekeeping=False, selection_rules=rules) as app:
        narrow = await app.select(request)
        assert set(_stages(narrow)["intent"]) == left
        assert narrow.chosen == inside, "the next rule that fires counts"
        assert out not in {one.tool for one in narrow.candidates}
        assert _recorded(app, narrow)["chosen"] == inside
        assert (await app.select(request, intent=False)).chosen == out, "there is no verdict, so the first rule counts"


@pytest.mark.proves("SURF-08")
async def test_what_a_rule_a_model_or_the_router_forces_is_denied_if_the_policy_forbids_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(home, selection_rules=[{"tool": "office.send_email", "words": ["tell"]}]) as app:
        text = app.policy.path.read_text()
        forbid = '@id("no-mail")\nforbid (principal, action, resource == Tool::"office.send_email");\n'
        await use_policy(app, text + forbid)
        made = await app.select("tell me the weather")
        assert made.chosen == "office.send_email"
        assert _stages(made)["rules"][0] == "office.send_email"
        assert len(_stages(made)["rules"]) <= 3
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("DENY", "authorization")
        assert "no-mail" in made.verdict.reason
        denied = _recorded(app, made)["gate"]
        assert denied == {"answer": "DENY", "check": "authorization", "reason": made.verdict.reason}
        # No model is offered what the policy forbids in every call, so one that names it has made it up.
        refused = await app.select("an email", selector=_chooses("office.send_email", value="x"), intent=False)
        assert (refused.chosen, refused.verdict, refused.candidates) == (None, None, ())
        among_others = await app.select("weather in Rome", selector=_chooses("office.send_email", value="x"))
        assert (among_others.chosen, among_others.verdict) == (None, None)
        assert "office.send_email" in (among_others.refused or "")
        # What a model or the router chose does not pass either where the policy forbids it here and not everywhere.
        await use_policy(app, text + forbid.replace(";", ' when { context.door == "library" };'))
        by_model = await app.select("an email", selector=_chooses("office.send_email", value="x"), intent=False)
        assert by_model.chosen == "office.send_email"
        assert by_model.verdict is not None
        assert (by_model.verdict.answer, by_model.verdict.check) == ("DENY", "authorization")
        assert _recorded(app, by_model)["gate"]["answer"] == "DENY"
        mail = _chooses("office.send_email", value="x")
        second = await app.select(
            "weather of the next seven days in the city of Rome, and an email", selector=mail, intent=False
        )
        assert second.candidates[0].tool != second.chosen == "office.send_email"
        assert second.verdict is not None
        assert (second.verdict.answer, second.verdict.check) == ("DENY", "authorization")
        monkeypatch.setattr(app.selections.learning, "router", _scripted("office.send_email"))
        by_router = await app.select("weather", intent=False)
        assert (by_router.chosen, by_router.candidates[0].reason) == ("office.send_email", "router")
        assert by_router.verdict is not None
        assert (by_router.verdict.answer, by_router.verdict.check) == ("DENY", "authorization")
        assert _recorded(app, by_router)["gate"]["answer"] == "DENY"
        # To somebody who cannot see the tool it does not exist, whatever the rules say.
        hidden = Caller(id="eve", scopes=frozenset())
        await admit(app, some_tool("payroll", "Salaries of all employees.", scopes=["hr"]))
        await app.catalog.forget()
        seen = await app.select("salaries of all employees", caller=hidden)
        assert "office.payroll" not in str(seen.document())


@pytest.mark.proves("SURF-03")
async def test_what_the_policy_forbids_is_not_counted_or_named_in_a_selection(tmp_path: Path) -> None:
    """A catalog with a forbidden tool selects like one without it: the same candidates, counts and scores."""
    made: list[Any] = []
    for forbidden in (True, False):
        async with opened(tmp_path / str(forbidden)) as app:
            if forbidden:
                await admit(app, some_tool("old_forecast", "Forecast of the weather of the next seven days in a city."))
                await app.catalog.forget()
                text = app.policy.path.read_text()
                await use_policy(app, text + 'forbid (principal, action, resource == Tool::"office.old_forecast");\n')
            one = await app.select("weather of the next seven days in a city", intent=False)
            assert "old_forecast" not in str(one.document())
            assert "old_forecast" not in str(_recorded(app, one))
            made.append(([stage.document() for stage in one.stages], [each.document() for each in one.candidates]))
    assert made[0] == made[1]
    assert made[0][1][0]["tool"] == "office.forecast"


def _chooses(tool_name: str | None, **parameters: Any) -> Any:
    async def selector(_: str, offered: Sequence[Json]) -> Json:
        assert all({"name", "parameters"} <= set(one) for one in offered)
        return {"tool": tool_name, "parameters": parameters}

    return selector


def _answered(app: Interlock, made: Any) -> Json:
    return next(one for one in _recorded(app, made)["stages"] if one["stage"] == "model")["answered"]


@pytest.mark.proves("SURF-07")
async def test_a_model_chooses_among_the_candidates_and_what_it_makes_up_never_reaches_the_gate(home: Path) -> None:
    async with opened(home) as app:
        made = await app.select("weather in Rome", selector=_chooses("office.forecast", value="Rome"))
        assert (made.chosen, made.parameters) == ("office.forecast", {"value": "Rome"})
        # The record has the tool, and of the parameters the digest that a call with them has.
        called = await app.call("office.forecast", {"value": "Rome"})
        assert called.ok
        (call,) = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq")[-1]
        digest = orjson.loads(call)["inputHash"]
        assert _answered(app, made) == {"tool": "office.forecast", "inputHash": digest}
        assert await app.selections.answer(made.id, app.caller) == {
            "tool": "office.forecast",
            "parameters": {"value": "Rome"},
        }
        for tool_name, parameters, code in (
            ("office.made_up", {"value": "Rome"}, "E3101"),
            ("office.forecast", {"city": "Rome"}, "E3301"),
        ):
            refused = await app.select("weather in Rome", selector=_chooses(tool_name, **parameters))
            assert (refused.chosen, refused.verdict) == (None, None)
            assert refused.refused is not None
            record = _recorded(app, refused)
            assert (record["refused"], record["left"]["model"], record["stages"][-1]["code"]) == (True, [], code)
            told = _answered(app, refused)
            assert told["tool"] == (None if code == "E3101" else tool_name)
            assert (told["inputHash"] == digest) == (code == "E3101")
            assert len(told["inputHash"]) == 64
            # A made-up name or parameter may hold words of the request: it is stored encrypted, as the request is.
            assert b"made_up" not in orjson.dumps(record)
            assert b"city" not in orjson.dumps(record)
            assert await app.selections.answer(refused.id, app.caller) == {
                "tool": tool_name,
                "parameters": parameters,
            }
        none = await app.select("weather in Rome", selector=_chooses(None))
        assert (none.chosen, none.refused) == (None, None)
        assert _answered(app, none)["tool"] is None
        # Only those who may read the journal of this tenant read it, and reading it is on record.
        assert app.journal.reader.one("SELECT count(*) FROM journal WHERE kind = 'audit.read'") == (3,)
        eve = Caller(id="eve", tenant="other", scopes=frozenset({"audit:read"}))
        assert await app.selections.answer(made.id, eve) is None
        with pytest.raises(Failure, match="audit:read"):
            await app.selections.answer(made.id, Caller(id="eve", scopes=frozenset()))


@pytest.mark.proves("SURF-07")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no model for maria@example.com"), "the selector failed: ValueError: no model for "),
        (KeyError(), "the selector failed: KeyError"),
        (TimeoutError(), "the selector failed: TimeoutError"),
        (ExceptionGroup("both", [OSError("one")]), "the selector failed: ExceptionGroup: both"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
async def test_a_selector_that_breaks_is_refused_before_the_gate_and_on_record(
    home: Path, caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    async def broken(_: str, __: Sequence[Json]) -> Json:
        raise error

    async with opened(home) as app:
        made = await app.select("weather in Rome", selector=broken)
        assert (made.chosen, made.parameters, made.verdict) == (None, None, None)
        assert made.refused is not None
        assert made.refused.startswith(said)
        assert made.candidates[0].tool == "office.forecast"
        record = _recorded(app, made)
        assert (record["refused"], record["left"]["model"]) == (True, [])
        assert record["stages"][-1]["code"] == "E3000"
        assert _answered(app, made) == {"tool": None, "inputHash": None}
        assert await app.selections.answer(made.id, app.caller) is None
        # The log has the place of the error, and nobody's address.
        assert "in broken" in caplog.text
        assert "maria" not in made.refused + caplog.text
        # The next selection is not affected.
        assert (await app.select("weather in Rome")).chosen == "office.forecast"


async def test_an_answer_that_breaks_its_check_is_refused_and_on_record(home: Path) -> None:
    class Broken(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise RuntimeError("no members")

    async def selector(_: str, __: Sequence[Json]) -> Json:
        return Broken(tool="office.forecast")

    async with opened(home) as app:
        made = await app.select("weather in Rome", selector=selector)
        assert made.refused == "the selector failed: RuntimeError: no members"
        assert _recorded(app, made)["refused"]


def _scripted(*tools: str) -> Any:
    """Stands for `Learning.router`: a router that always puts these tools first, in this order."""
    weights = np.zeros((features([""]).shape[1], len(tools)), np.float32)
    weights[-1] = [60 - 0.3 * place for place in range(len(tools))]  # the feature that is always 1

    async def router(_: str) -> Router:
        return Router(tools, weights)

    return router


@pytest.mark.proves("SURF-07")
@pytest.mark.parametrize("model", [False, True], ids=["no model", "model"])
@pytest.mark.parametrize("rule", [False, True], ids=["no rule", "rule"])
@pytest.mark.parametrize("router", [False, True], ids=["no router", "router"])
async def test_every_stage_leaves_its_candidates_with_or_without_the_others(
    home: Path, monkeypatch: pytest.MonkeyPatch, *, router: bool, rule: bool, model: bool
) -> None:
    rules = [{"tool": "office.run_query", "words": ["weather"]}] if rule else []
    async with opened(home, selection_rules=rules) as app:
        await admit(app, *(some_tool(f"weather_{n}", f"Weather of city number {n}, and more.") for n in range(12)))
        await app.catalog.forget()
        if router:
            monkeypatch.setattr(app.selections.learning, "router", _scripted("office.translate", "office.send_email"))

        async def last(asked: str, offered: Sequence[Json]) -> Json:
            assert asked == "weather"
            return {"tool": offered[-1]["name"], "parameters": {"value": "x"}}

        made = await app.select("weather", intent=False, selector=last if model else None)
        left = _stages(made)
        assert made.stages[0].before > 20
        assert len(left["router"]) == 10
        first = left["router"][:2]
        assert (first == ["office.translate", "office.send_email"]) == router
        expected = ["office.run_query", *first] if rule else left["router"]
        assert left["rules"] == left["allocation"] == [one.tool for one in made.candidates] == expected
        assert made.chosen == (expected[-1] if model else expected[0])
        assert left["model"] == ([made.chosen] if model else expected)
        assert made.parameters == ({"value": "x"} if model else None)
        assert made.verdict is not None
        assert made.verdict.answer == "ALLOW"
        record = _recorded(app, made)
        assert record["left"]["rules"] == record["left"]["allocation"] == record["left"]["cost"] == expected
        assert record["left"]["router"] == left["router"]
        assert record["left"]["model"] == left["model"]
        # As many as the allocation holds, in their order.
        sizes = [one.tokens for one in made.candidates]
        cut = await app.select(
            "weather", intent=False, selector=last if model else None, allocation=sizes[0] + sizes[1]
        )
        assert [one.tool for one in cut.candidates][:2] == expected[:2]
        assert cut.tokens["schemas"] <= sizes[0] + sizes[1]
        record = _recorded(app, cut)
        assert record["left"]["allocation"] == [one.tool for one in cut.candidates]
        assert (record["chosen"], record["gate"]["answer"]) == (cut.chosen, "ALLOW")
        assert cut.chosen == cut.candidates[-1 if model else 0].tool
        # What was cut cannot be chosen any more.
        (gone, *_) = set(expected) - {one.tool for one in cut.candidates}
        allocation = sizes[0] + sizes[1]
        refused = await app.select("weather", intent=False, selector=_chooses(gone, value="x"), allocation=allocation)
        assert (refused.chosen, refused.verdict, refused.stages[-1].facts["code"]) == (None, None, "E3101")


def _completion(*calls: tuple[str, str]) -> HttpAnswer:
    told = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]
    return json_answer({"choices": [{"message": {"role": "assistant", "tool_calls": told}}]})


@pytest.mark.proves("SURF-07")
async def test_a_model_behind_an_endpoint_chooses_and_its_answers_are_checked(home: Path) -> None:
    def answer(got: Got) -> HttpAnswer:
        assert got.path == "/v1/chat/completions"
        assert orjson.loads(got.body)["messages"][-1] == {"role": "user", "content": "weather in Rome"}
        offered = [one["function"]["name"] for one in orjson.loads(got.body)["tools"]]
        return _completion((next(name for name in offered if "forecast" in name), '{"value": "Rome"}'))

    async with HttpServer.open() as server, opened(home, selection_model=f"openai:small@{server.url}") as app:
        server.otherwise = answer
        made = await app.select("weather in Rome")
        assert (made.chosen, made.parameters) == ("office.forecast", {"value": "Rome"})
        wrong = [
            _completion(("made_up", "{}")),
            _completion(("made_up", "[1")),
            json_answer({"choices": []}),
            json_answer([1]),
            HttpAnswer(status=500),
        ]
        for one in wrong:
            server.answers = [one]
            refused = await app.select("weather in Rome")
            assert (refused.chosen, refused.verdict) == (None, None)
            assert refused.refused
        server.answers = [_completion()]
        none = await app.select("weather in Rome")
        assert (none.chosen, none.refused) == (None, None)


async def test_a_caller_makes_the_model_of_the_settings_choose_so_often_a_minute(home: Path) -> None:
    clock = FakeClock()
    async with HttpServer.open() as server:
        server.otherwise = lambda _: _completion()
        settings: Json = {"selection_model": f"openai:small@{server.url}", "selection_model_per_minute": 2}
        async with opened(home, clock=clock.clock, **settings) as app:
            eve = Caller(id="eve", scopes=frozenset())
            for _ in range(2):
                assert (await app.select("weather in Rome", caller=eve, intent=False)).refused is None
            with pytest.raises(Failure, match="2 selections by a model per caller in a minute") as refused:
                await app.select("weather in Rome", caller=eve, intent=False)
            assert refused.value.code == "E3003"
            assert refused.value.retry_after_ms
            assert len(server.got) == 2
            # Another caller has their own, and a model of the caller's own is theirs to ask.
            await app.select("weather in Rome", intent=False)
            mine = await app.select("weather in Rome", caller=eve, selector=_chooses(None), intent=False)
            assert mine.refused is None
            assert len(server.got) == 3
            clock.advance(61)
            await app.select("weather in Rome", caller=eve, intent=False)
            assert len(server.got) == 4


@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize(
    ("settings", "parameters", "check", "answer", "says"),
    [
        ({}, {"value": "select 1"}, None, "ALLOW", "rule "),
        ({}, {"value": "DROP TABLE orders"}, "safety", "DENY", "the parameters hold DROP"),
        ({"selection_dangers": "ask"}, {"value": "DROP TABLE orders"}, "safety", "REQUIRE_APPROVAL", "hold DROP"),
        ({"budgets": [{"per": "call", "limit": 2.0}]}, {"value": "x"}, None, "ALLOW", "rule "),
        ({"budgets": [{"per": "call", "limit": 1.999999}]}, {"value": "x"}, "cost", "DENY", "per call"),
        ({"budgets": [{"per": "session", "limit": 2.0}]}, {"value": "x"}, None, "ALLOW", "rule "),
        ({"budgets": [{"per": "session", "limit": 1.999999}]}, {"value": "x"}, "cost", "DENY", "per session"),
    ],
)
async def test_each_check_of_the_gate_alone_decides(
    home: Path, settings: Json, parameters: Json, check: str | None, answer: str, says: str
) -> None:
    async with opened(home, **settings) as app:
        made = await app.select("run an SQL query", selector=_chooses("office.run_query", **parameters), session="s")
        verdict = made.verdict
        assert verdict is not None
        assert verdict.answer == answer, verdict
        strict = [one.check for one in verdict.findings if one.answer != "ALLOW"]
        assert strict == ([] if check is None else [check])
        assert verdict.timeout_s == (app.settings.approval.timeout_seconds if answer == "REQUIRE_APPROVAL" else None)
        assert {one.check for one in verdict.findings} == {"authorization", "safety", "cost", "rate"}
        assert all(one.reason for one in verdict.findings)
        decided = next(one for one in verdict.findings if one.check == (check or "authorization"))
        assert (verdict.check, verdict.answer, verdict.reason) == (decided.check, decided.answer, decided.reason)
        assert says in verdict.reason
        assert _recorded(app, made)["gate"] == {"answer": answer, "check": decided.check, "reason": decided.reason}


def _strict(made: Any) -> list[tuple[str, str]]:
    """The checks that did not allow a call, with their answers."""
    assert made.verdict is not None
    return [(one.check, one.answer) for one in made.verdict.findings if one.answer != "ALLOW"]


@pytest.mark.proves("SURF-08")
async def test_the_gate_asks_whether_this_caller_may_make_the_call(home: Path) -> None:
    async with opened(home) as app:
        forbid = '@id("mail-is-for-sales")\nforbid (principal, action, resource == Tool::"office.send_email")'
        # In a call that a program makes: what somebody may never call is not selected for them.
        forbid += ' when { context.door == "library" } unless { principal in Group::"sales" };\n'
        await use_policy(app, app.policy.path.read_text() + forbid)
        mail = _chooses("office.send_email", value="x")
        ann = Caller(id="ann", scopes=frozenset(), groups=frozenset({"sales"}))
        bob = Caller(id="bob", scopes=frozenset(), groups=frozenset({"support"}))
        may = await app.select("an email", selector=mail, intent=False, caller=ann)
        assert (may.chosen, _strict(may)) == ("office.send_email", [])
        may_not = await app.select("an email", selector=mail, intent=False, caller=bob)
        assert (may_not.chosen, _strict(may_not)) == ("office.send_email", [("authorization", "DENY")])
        assert may_not.verdict is not None
        assert (may_not.verdict.answer, may_not.verdict.check) == ("DENY", "authorization")
        assert "mail-is-for-sales" in may_not.verdict.reason
        # A tool that the token lacks is not offered, also if a rule or a model names it.
        await app.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
        token = await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("office.translate")], by=app.caller)
        bot = await app.caller_of(token)
        unnamed = await app.select("an email", selector=mail, intent=False, caller=bot)
        assert (unnamed.chosen, unnamed.verdict) == (None, None)
        # A token that is revoked while the model chooses is noticed by the gate.
        assert bot.capability is not None
        link = bot.capability.leaf.jti

        async def meanwhile(_: str, __: Sequence[Json]) -> Json:
            await app.tokens.revoke(link, by=app.caller, reason="lost")
            return {"tool": "office.translate", "parameters": {"value": "x"}}

        late = await app.select("translate a text", selector=meanwhile, intent=False, caller=bot)
        assert (late.chosen, _strict(late)) == ("office.translate", [("authorization", "DENY")])
        assert late.verdict is not None
        assert "revoked" in late.verdict.reason


@tool(
    version="1.0.0",
    mutation_class="read_only",
    namespace="paid",
    external_io=False,
    estimated_cost=2.0,
)
async def query(ctx: Context, value: Value) -> str:
    """Run an SQL query on a database that costs money."""
    ctx.cost(external_api=2.0)
    return value


@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize(
    ("limit", "second", "dangers"), [(4.0, "ALLOW", "deny"), (3.999999, "DENY", "ask")], ids=["reached", "exceeded"]
)
async def test_what_a_session_has_spent_counts_for_that_session(
    home: Path, limit: float, second: str, dangers: str
) -> None:
    budget = {"per": "session", "limit": limit}
    async with opened(home, budgets=[budget], selection_dangers=dangers) as app:
        await admit(app, query)
        await app.catalog.forget()

        async def gate(session: str, **parameters: str) -> Any:
            chooses = _chooses("paid.query", **(parameters or {"value": "x"}))
            return await app.select("run an SQL query", selector=chooses, session=session)

        assert _strict(await gate("monday")) == []
        assert (await app.call("paid.query", {"value": "1"}, session="monday")).ok
        # Exactly reached by the next call, or exceeded by one millionth.
        assert (await gate("monday")).verdict.answer == second
        if second == "ALLOW":
            assert (await app.call("paid.query", {"value": "2"}, session="monday")).ok
        full = await gate("monday")
        assert _strict(full) == [("cost", "DENY")]
        assert full.verdict.check == "cost"
        assert "per session" in full.verdict.reason
        assert _strict(await gate("tuesday")) == []
        # Of several checks the strictest is told, with its own reason.
        both = await gate("monday", value="DROP TABLE orders")
        first = ("safety", "DENY") if dangers == "deny" else ("safety", "REQUIRE_APPROVAL")
        assert _strict(both) == [first, ("cost", "DENY")]
        assert (both.verdict.answer, both.verdict.timeout_s) == ("DENY", None)
        assert both.verdict.check == ("safety" if dangers == "deny" else "cost")
        assert ("DROP" if dangers == "deny" else "per session") in both.verdict.reason


@pytest.mark.proves("SURF-08")
async def test_a_call_that_a_person_must_approve_says_so_with_the_time_they_have(home: Path) -> None:
    async with opened(home, approval={"timeout_seconds": 1234}) as app:
        ask = '@id("ask-mail")\n@ask("a person agrees to mail")\n'
        ask += 'forbid (principal, action, resource == Tool::"office.send_email") unless { context.approved };\n'
        await use_policy(app, app.policy.path.read_text() + ask)
        made = await app.select("send a mail", selector=_chooses("office.send_email", value="x"), intent=False)
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("REQUIRE_APPROVAL", "authorization")
        assert made.verdict.timeout_s == 1234
        assert made.verdict.reason


@pytest.mark.proves("SURF-08")
async def test_the_window_of_a_rate_slides(home: Path) -> None:
    clock = FakeClock()
    rate = {"per": "tool", "limit": 2, "window_s": 60, "tools": "office.forecast"}
    async with opened(home, clock=clock.clock, rate_limits=[rate]) as app:

        async def answer() -> str:
            made = await app.select("weather in Rome", intent=False)
            assert made.chosen == "office.forecast"
            assert made.verdict is not None
            assert (made.verdict.answer == "ALLOW") == (made.verdict.check != "rate")
            return made.verdict.answer

        assert (await app.call("office.forecast", value="Rome")).ok
        clock.advance(40)
        assert await answer() == "ALLOW"
        assert (await app.call("office.forecast", value="Oslo")).ok
        clock.advance(19)
        assert await answer() == "DENY"
        clock.advance(2)  # the first call is 61 s ago, the second 21
        assert await answer() == "ALLOW"
        assert (await app.call("office.forecast", value="Bern")).ok
        clock.advance(30)  # a window that began anew after a minute would hold one call
        assert await answer() == "DENY"


@pytest.mark.proves("SURF-08")
async def test_the_rate_of_a_tool_counts_and_a_selection_uses_nothing_up(home: Path) -> None:
    async with opened(home, rate_limits=[{"per": "tool", "limit": 1, "window_s": 86_400, "tools": "office.*"}]) as app:
        for _ in range(2):
            made = await app.select("weather in Rome")
            assert made.verdict is not None
            assert made.verdict.answer == "ALLOW"
        assert (await app.call("office.forecast", value="Rome")).ok
        made = await app.select("weather in Rome")
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("DENY", "rate")
        assert _strict(made) == [("rate", "DENY")]
        assert "the limit of" in made.verdict.reason
        # The limit is per tool: another tool under the same rule still passes.
        other = await app.select("translate", selector=_chooses("office.translate", value="x"), intent=False)
        assert (other.chosen, _strict(other)) == ("office.translate", [])


@pytest.mark.proves("SURF-10")
async def test_above_fifty_tools_categories_are_chosen_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(home) as app:
        papers = [some_tool(f"archive_{n}", f"Old paper number {n}.", namespace="attic") for n in range(60)]
        # Tools that the caller does not see do not count.
        hidden = [some_tool(f"secret_{n}", "A secret paper.", scopes=["secret"]) for n in range(60)]
        await admit(app, *hidden)
        await app.catalog.forget()
        eve = Caller(id="eve", scopes=frozenset())
        few = await app.select("weather in Rome", caller=eve)
        assert few.tokens["categories"] == 0
        missing = 50 - few.stages[0].before
        await admit(app, *papers[:missing])
        await app.catalog.forget()
        fifty = await app.select("weather in Rome", caller=eve)
        assert fifty.tokens["categories"] == 0
        assert next(one for one in fifty.stages if one.name == "hierarchy").why == "50 tools are few enough"
        await admit(app, papers[missing])
        await app.catalog.forget()
        more = await app.select("weather in Rome", intent=False, caller=eve)
        assert more.tokens["categories"] > 0
        await admit(app, *papers[missing + 1 :])
        await app.catalog.forget()
        made = await app.select("what is the weather in Rome", intent=False, caller=eve)
        assert made.chosen == "office.forecast"
        stage = next(one for one in made.stages if one.name == "hierarchy")
        names = stage.facts["categories"]
        (total,) = map(int, re.findall(r" of (\d+) categories", stage.why))
        assert 1 <= len(names) < total
        # Nothing but the tools of the chosen categories is looked at: less than half of them here.
        assert stage.before == made.stages[0].before > 60
        assert len(stage.tools) <= len(names) * most_tools(stage.before)
        assert len(stage.tools) < stage.before / 2
        assert set(_stages(made)["retrieval"]) <= set(stage.tools)
        body = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'selection'")[-1][0]
        recorded = next(one for one in orjson.loads(body)["stages"] if one["stage"] == "hierarchy")
        assert recorded["categories"] == stage.facts["categories"]
        # A step shows the categories, or ten schemas at most, and neither grows with each tool.
        assert 0 < made.tokens["categories"] <= 60 * total
        assert 0 < made.tokens["schemas"] == sum(one.tokens for one in made.candidates)
        assert len(made.candidates) <= 10
        assert made.tokens["schemas"] == more.tokens["schemas"]
        # Nor does a router bring in a tool of another category.
        (other, *_) = {f"attic.archive_{n}" for n in range(60)} - set(stage.tools)
        monkeypatch.setattr(app.selections.learning, "router", _scripted(other))
        routed = await app.select("what is the weather in Rome", intent=False, caller=eve)
        assert set(_stages(routed)["router"]) <= set(stage.tools)
        assert routed.candidates[0].reason == "router"


@pytest.mark.proves("SURF-16")
async def test_of_equal_tools_the_cheaper_is_chosen_where_cost_counts_and_the_trade_is_stated(home: Path) -> None:
    async with opened(home) as app:
        words = "Parcel tracking for shipments."
        await admit(app, some_tool("track_1", words, estimated_cost=0.5, namespace="post"))
        await admit(app, some_tool("track_2", words, estimated_cost=0.125, namespace="post"))
        await app.catalog.forget()
        plain = await app.select("parcel tracking for shipments", intent=False)
        assert plain.chosen == "post.track_1"
        made = await app.select("parcel tracking for shipments", intent=False, cheaper=True)
        assert made.chosen == "post.track_2"
        stage = next(one for one in made.stages if one.name == "cost")
        stated = "post.track_2 at 0.125 instead of post.track_1 at 0.5: saves 0.375 a call, with "
        assert stage.why.startswith(stated)
        # The record of the selection states the trade too, and one without a trade has none.
        trade = {"chosen": "post.track_2", "instead_of": "post.track_1", "cost": 0.125, "saved": 0.375}
        (recorded,) = [one for one in _recorded(app, made)["stages"] if one["stage"] == "cost"]
        assert recorded["trade"].items() >= trade.items()
        gained = recorded["trade"]["expected_success"]
        assert -0.02 <= gained <= 0
        assert stage.why == f"{stated}{gained:+.3f} of expected success"
        assert not [one for one in _recorded(app, plain)["stages"] if "trade" in one]
        async with wired(app) as wires:
            for wire in BY_ID:
                for cheaper, wanted in ((True, "post.track_2"), (False, "post.track_1")):
                    told = await wires.rows[wire].select("parcel tracking for shipments", intent=False, cheaper=cheaper)
                    assert told["chosen"] == wanted, wire
                    (cost,) = [one for one in told["stages"] if one["stage"] == "cost"]
                    assert cost["why"].startswith(stated) is cheaper, wire
                    assert ("trade" in cost) is cheaper
                    assert (cost.get("trade") or trade).items() >= trade.items()


@tool(
    version="1.0.0", mutation_class="read_only", namespace="post", external_io=False, estimated_cost=0.125,
)  # fmt: skip
async def track_dear(ctx: Context, value: Value) -> str:
    """Parcel tracking for shipments."""
    ctx.cost(external_api=1.0)
    return value


@tool(
    version="1.0.0", mutation_class="read_only", namespace="post", external_io=False, estimated_cost=0.5,
)  # fmt: skip
async def track_fair(ctx: Context, value: Value) -> str:
    """Parcel tracking for shipments."""
    ctx.cost(external_api=0.25)
    if value == "lost":
        raise ValueError(value)
    return value


@pytest.mark.proves("SURF-16")
async def test_what_calls_have_cost_and_how_often_they_failed_enters_the_choice_and_the_report(home: Path) -> None:
    async with opened(home) as app:
        await admit(app, track_dear, track_fair)
        await app.catalog.forget()
        request, me = "parcel tracking for shipments", app.caller
        other = Caller(id="eve", tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        task = [(request, [frozenset({"post.track_dear", "post.track_fair"})])]

        async def costs(caller: Caller = me) -> dict[str, float]:
            made = await app.select(request, intent=False, cheaper=True, caller=caller)
            return {made.chosen or "": next(one.cost for one in made.candidates if one.tool == made.chosen)}

        async def call(tool: str, value: str, caller: Caller = me) -> None:
            assert (await app.call(tool, {"value": value}, caller=caller)).ok == (value != "lost")

        # What tools state counts, until the tenant has made five calls of them. Those of others say nothing.
        assert await costs() == {"post.track_dear": 0.125}
        for number in range(4):
            await call("post.track_dear", str(number))
            await call("post.track_fair", str(number))
            await call("post.track_dear", str(number), other)
        await call("post.track_dear", "4", other)
        assert await costs() == {"post.track_dear": 0.125}
        await call("post.track_dear", "4")
        await call("post.track_fair", "4")
        assert await costs() == {"post.track_fair": 0.25}
        # The other tenant knows of its own five calls alone, and a tool without any is no equal of theirs.
        assert await costs(other) == {"post.track_dear": 1.0}
        # The report has the cost of the tool that is chosen, from the journal: the same every time.
        cheap = await evaluate(app.selections, task, me, intent=False, cheaper=True)
        dear = await evaluate(app.selections, task, me, intent=False)
        price = app.settings.selection_token_price / 1_000_000
        assert [one["cost_per_task"] - price * one["tokens_per_task"] for one in (cheap, dear)] == pytest.approx(
            [0.25, 1.0], abs=1e-6
        )
        assert cheap == await evaluate(app.selections, task, me, intent=False, cheaper=True)
        # A tool that fails is no equal any more, however cheap it is.
        for _ in range(6):
            await call("post.track_fair", "lost")
        assert await costs() == {"post.track_dear": 1.0}


@pytest.mark.parametrize("faster", [False, True])
async def test_of_equal_tools_the_faster_is_chosen_at_every_door_where_latency_counts(home: Path, faster: bool) -> None:
    clock = FakeClock()

    def takes(name: str, seconds: float) -> Any:
        async def track(value: Value) -> str:
            clock.advance(3 if value == "lost" else seconds)
            if value == "lost":
                raise ValueError(value)
            return value

        track.__name__, track.__doc__ = name, "Parcel tracking for shipments."
        return tool(version="1.0.0", mutation_class="read_only", namespace="post", external_io=False)(track)

    async with opened(home, clock=clock.clock) as app:
        await admit(app, takes("track_1", 0.9), takes("track_2", 0.2))
        await app.catalog.forget()
        request, me = "parcel tracking for shipments", app.caller
        first = await app.select(request, intent=False, faster=True)
        assert first.chosen == "post.track_1"
        assert [one.latency_ms for one in first.candidates[:2]] == [None, None]
        for number in range(5):
            for name in ("post.track_1", "post.track_2"):
                assert (await app.call(name, {"value": str(number)})).ok
        # Failed calls say nothing about how long a call takes, nor do those of another tenant.
        for name in ("post.track_1", "post.track_2"):
            assert not (await app.call(name, {"value": "lost"})).ok
        other = Caller(id="eve", tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        assert (await app.select(request, intent=False, faster=True, caller=other)).chosen == "post.track_1"
        for number in range(5):
            assert (await app.call("post.track_1", {"value": f"again {number}"})).ok
            assert (await app.call("post.track_2", {"value": f"again {number}"})).ok
        wanted = "post.track_2" if faster else "post.track_1"
        async with wired(app) as wires:
            wires.bear(await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("post.*")], by=app.caller))
            asked: Json = {"request": request, "intent": False, "faster": faster}
            mine = (await app.select(request, intent=False, faster=faster)).document()
            for told in (mine, *[await wires.rows[wire].select(**asked) for wire in BY_ID]):
                assert told["chosen"] == wanted
                (stage,) = [one for one in told["stages"] if one["stage"] == "latency"]
                assert ("instead of post.track_1" in stage["why"]) is faster
                latencies = {one["tool"]: one["latency_ms"] for one in told["candidates"]}
                assert latencies["post.track_1"] == pytest.approx(900.0)
                assert latencies["post.track_2"] == pytest.approx(200.0)
        task = [(request, [frozenset({"post.track_1", "post.track_2"})])]
        measured = await evaluate(app.selections, task, me, intent=False, faster=faster)
        assert measured["latency_ms_per_task"] == pytest.approx(200.0 if faster else 900.0)


@pytest.mark.parametrize("name", ["office.\ud800x", "\udfff"])
async def test_half_a_character_in_a_name_or_a_request_is_refused(home: Path, name: str) -> None:
    async with opened(home) as app:
        service = Service(app)
        for ask in (
            app.select(name),
            app.recommend(name),
            app.tools.find(name, None, app.caller),
            app.tools.negotiate({name: {}}, app.caller),
            service.surfaces.load([name], app.caller),
            service.surface_views.show(by=app.caller, who=name),
        ):
            with pytest.raises(Failure, match="valid Unicode") as refused:
                await ask
            assert refused.value.code == "E3004"
        result = await app.call(name, {})
        assert result.error is not None
        assert result.error.code == "E3004"
        await service.close()


@pytest.mark.proves("SURF-07")
async def test_every_door_selects_the_same_for_the_holder_of_a_token(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(home) as app, wired(app) as wires:
        asked: Json = {"request": "weather in Rome", "intent": False, "allocation": 5000}

        def plain(told: Json) -> Json:
            return {**told, "id": ""}

        told = [await wires.rows[wire].select(**asked) for wire in BY_ID]
        for one in told:
            assert (one["chosen"], one["gate"]["answer"]) == ("office.forecast", "ALLOW")
            assert plain(one) == plain(told[0])
        kept = app.journal.reader.all("SELECT call FROM journal WHERE kind = 'selection' ORDER BY seq")
        assert [one for (one,) in kept] == [one["id"] for one in told]
        # A caller gets no tool that their token does not name, and mistakes are refused.
        grants = [ToolGrant("office.translate"), ToolGrant("office.send_email")]
        wires.bear(await app.tokens.issue(subject=did_of("bot"), tools=grants, by=app.caller))
        hidden = await wires.http.post("/v1/tools/select", json=asked)
        assert "forecast" not in hidden.text
        # The router keeps ten, or as many as there are.
        monkeypatch.setattr(app.selections.learning, "router", _scripted("office.forecast", "office.translate"))
        routed = await wires.http.post("/v1/tools/select", json=asked)
        assert "forecast" not in routed.text
        ranked: list[Json] = routed.json()["candidates"]
        assert [one["tool"] for one in ranked] == ["office.translate", "office.send_email"]
        more: list[Json] = [{"allocation": -1}, {"cheaper": 7}, {"faster": 7}, {"session": 7}]
        for wrong in ({}, {"request": ""}, {"request": 7}, *({"request": "x", **one} for one in more)):
            assert (await wires.http.post("/v1/tools/select", json=wrong)).status_code == 400, wrong
            assert "error" in (await wires.rpc("tools.select", wrong)), wrong
