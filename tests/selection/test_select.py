"""`lock.select`: a tool for a request, through every stage and the gate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest

from interlock import Field, Interlock, Tool, tool
from interlock.call.context import Caller
from interlock.data.schema import Json
from tests.support.calls import admit
from tests.upstreams.servers import Answer as HttpAnswer
from tests.upstreams.servers import Got, HttpServer, json_answer

READING = "a reading of the clause against these tests, sentence by sentence, by somebody who did not write them"
Value = Annotated[str, Field(description="a value", examples=["x"])]


def some_tool(name: str, text: str, **options: Any) -> Tool[..., Any]:
    async def function(value: Value) -> str:
        return f"{name} {value}"

    function.__name__, function.__doc__ = name, text
    facts: dict[str, Any] = {
        "version": "1.0.0",
        "mutation_class": "read_only",
        "namespace": "office",
        "external_io": False,
        **options,
    }
    return tool(**facts)(function)


TOOLS = [
    some_tool("send_email", "Send an email message to a recipient."),
    some_tool("create_invoice", "Write an invoice for goods that a customer ordered."),
    some_tool("forecast", "Weather of the next seven days in a city."),
    some_tool("translate", "Translate a text into another language."),
    some_tool("run_query", "Run an SQL query on the database of orders.", estimated_cost=2.0),
]


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **settings) as lock:
        await admit(lock, *TOOLS)
        await lock.catalog.forget()
        yield lock


def _stages(made: Any) -> dict[str, list[str]]:
    return {one.name: list(one.tools) for one in made.stages}


async def test_a_request_gets_a_tool_with_what_every_stage_left(home: Path) -> None:
    async with opened(home) as lock:
        made = await lock.select("will it rain in Rome tomorrow?")
        assert made.chosen == "office.forecast"
        assert [one.name for one in made.stages] == [
            "intent", "hierarchy", "retrieval", "router", "rules", "allocation", "cost", "model",
        ]  # fmt: skip
        assert made.verdict is not None
        assert made.verdict.answer == "ALLOW"
        assert made.candidates[0].tokens > 0
        (body,) = lock.journal.reader.one("SELECT body FROM journal WHERE kind = 'selection'")
        record: Json = orjson.loads(body)
        assert (record["chosen"], record["gate"]["answer"]) == ("office.forecast", "ALLOW")
        assert record["intent"] is not None
        assert record["left"]["rules"] == list(_stages(made)["rules"])
        assert b"Rome" not in body
        (stored,) = lock.journal.reader.one("SELECT body FROM payload WHERE call = ?", (made.id,))
        assert b"Rome" not in stored


@pytest.mark.part_of("SURF-15", rest=READING)
async def test_chatter_gets_no_tool_and_requests_are_not_stored_if_that_is_set(home: Path) -> None:
    async with opened(home, selection_requests="never") as lock:
        made = await lock.select("thank you so much")
        assert (made.chosen, made.verdict) == (None, None)
        assert made.intent is not None
        assert made.intent.kind == "none"
        without = await lock.select("thank you so much", intent=False)
        assert without.intent is None
        assert set(_stages(made)["intent"]) < set(_stages(without)["intent"])
        assert lock.journal.reader.one("SELECT count(*) FROM payload") == (0,)


@pytest.mark.part_of("SURF-08", rest=READING)
async def test_a_rule_that_forces_a_forbidden_tool_is_denied(home: Path) -> None:
    async with opened(home, selection_rules=[{"tool": "office.send_email", "words": ["tell"]}]) as lock:
        text = lock.policy.path.read_text()
        forbid = '@id("no-mail")\nforbid (principal, action, resource == Tool::"office.send_email");\n'
        lock.policy.path.write_text(text + forbid)
        made = await lock.select("tell me the weather")
        assert made.chosen == "office.send_email"
        assert _stages(made)["rules"][0] == "office.send_email"
        assert len(_stages(made)["rules"]) <= 3
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("DENY", "authorization")
        # To somebody who cannot see the tool it does not exist, whatever the rules say.
        hidden = Caller(id="eve", scopes=frozenset())
        await admit(lock, some_tool("payroll", "Salaries of all employees.", scopes=["hr"]))
        await lock.catalog.forget()
        seen = await lock.select("salaries of all employees", caller=hidden)
        assert "office.payroll" not in str(seen.document())


def _chooses(tool_name: str | None, **parameters: Any) -> Any:
    async def selector(_: str, offered: Sequence[Json]) -> Json:
        assert all({"name", "parameters"} <= set(one) for one in offered)
        return {"tool": tool_name, "parameters": parameters}

    return selector


@pytest.mark.part_of("SURF-07", rest=READING)
async def test_a_model_chooses_among_the_candidates_and_what_it_makes_up_never_reaches_the_gate(home: Path) -> None:
    async with opened(home) as lock:
        made = await lock.select("weather in Rome", selector=_chooses("office.forecast", value="Rome"))
        assert (made.chosen, made.parameters) == ("office.forecast", {"value": "Rome"})
        for selector in (_chooses("office.made_up"), _chooses("office.forecast", city="Rome")):
            refused = await lock.select("weather in Rome", selector=selector)
            assert (refused.chosen, refused.verdict) == (None, None)
            assert refused.refused is not None
        none = await lock.select("weather in Rome", selector=_chooses(None))
        assert (none.chosen, none.refused) == (None, None)


def _completion(*calls: tuple[str, str]) -> HttpAnswer:
    told = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]
    return json_answer({"choices": [{"message": {"role": "assistant", "tool_calls": told}}]})


@pytest.mark.part_of("SURF-07", rest=READING)
async def test_a_model_behind_an_endpoint_chooses_and_its_answers_are_checked(home: Path) -> None:
    def answer(got: Got) -> HttpAnswer:
        assert got.path == "/v1/chat/completions"
        offered = [one["function"]["name"] for one in orjson.loads(got.body)["tools"]]
        return _completion((next(name for name in offered if "forecast" in name), '{"value": "Rome"}'))

    async with HttpServer.open() as server, opened(home, selection_model=f"openai:small@{server.url}") as lock:
        server.otherwise = answer
        made = await lock.select("weather in Rome")
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
            refused = await lock.select("weather in Rome")
            assert (refused.chosen, refused.verdict) == (None, None)
            assert refused.refused
        server.answers = [_completion()]
        none = await lock.select("weather in Rome")
        assert (none.chosen, none.refused) == (None, None)


@pytest.mark.part_of("SURF-08", rest=READING)
@pytest.mark.parametrize(
    ("settings", "parameters", "check", "answer"),
    [
        ({}, {"value": "select 1"}, None, "ALLOW"),
        ({}, {"value": "DROP TABLE orders"}, "safety", "DENY"),
        ({"selection_dangers": "ask"}, {"value": "DROP TABLE orders"}, "safety", "REQUIRE_APPROVAL"),
        ({"budgets": [{"per": "call", "limit": 2.0}]}, {"value": "x"}, None, "ALLOW"),
        ({"budgets": [{"per": "call", "limit": 1.999999}]}, {"value": "x"}, "cost", "DENY"),
        ({"budgets": [{"per": "session", "limit": 2.0}]}, {"value": "x"}, None, "ALLOW"),
        ({"budgets": [{"per": "session", "limit": 1.999999}]}, {"value": "x"}, "cost", "DENY"),
    ],
)
async def test_each_check_of_the_gate_alone_decides(
    home: Path, settings: Json, parameters: Json, check: str | None, answer: str
) -> None:
    async with opened(home, **settings) as lock:
        made = await lock.select("run an SQL query", selector=_chooses("office.run_query", **parameters), session="s")
        verdict = made.verdict
        assert verdict is not None
        assert verdict.answer == answer, verdict
        strict = [one.check for one in verdict.findings if one.answer != "ALLOW"]
        assert strict == ([] if check is None else [check])
        assert (verdict.timeout_s is not None) == (answer == "REQUIRE_APPROVAL")


@pytest.mark.part_of("SURF-08", rest=READING)
async def test_the_rate_of_a_tool_counts_and_a_selection_uses_nothing_up(home: Path) -> None:
    async with opened(
        home, rate_limits=[{"per": "tool", "limit": 1, "window_s": 86_400, "tools": "office.forecast"}]
    ) as lock:
        for _ in range(2):
            made = await lock.select("weather in Rome")
            assert made.verdict is not None
            assert made.verdict.answer == "ALLOW"
        assert (await lock.call("office.forecast", value="Rome")).ok
        made = await lock.select("weather in Rome")
        assert made.verdict is not None
        assert (made.verdict.answer, made.verdict.check) == ("DENY", "rate")


@pytest.mark.part_of("SURF-10", rest=READING)
async def test_above_fifty_tools_categories_are_chosen_first(home: Path) -> None:
    async with opened(home) as lock:
        few = await lock.select("weather in Rome")
        assert few.tokens["categories"] == 0
        await admit(lock, *(some_tool(f"archive_{n}", f"Old paper number {n}.", namespace="attic") for n in range(60)))
        await lock.catalog.forget()
        made = await lock.select("what is the weather in Rome", intent=False)
        assert made.chosen == "office.forecast"
        stage = next(one for one in made.stages if one.name == "hierarchy")
        assert len(stage.facts["categories"]) >= 1
        assert len(stage.tools) <= 65
        assert made.tokens["categories"] > 0
