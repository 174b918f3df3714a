"""Function schemas of model providers, registered by command and endpoint, and carried out by an HTTP service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock import Caller, Interlock, Result
from interlock.api.service import Service
from interlock.contract.contract import contract_of
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams import formats, functions
from interlock.upstreams.formats import Provider
from interlock.upstreams.manifests import import_all
from interlock.upstreams.overlay import parse_overlay
from tests.support.calls import SIX, records
from tests.support.cli import Cli
from tests.support.hostile import loop_is_free
from tests.support.providers import PROVIDERS, TAKES, declared
from tests.support.upstream_servers import Answer, HttpServer, governed, json_answer, remote_call

APPROVER = Caller(id="local:approver", groups=frozenset({"approvers"}))
READS = {"defaults": {"mutation_class": "read_only"}}


@pytest.mark.shows("Function schemas of a provider", "discovery")
@pytest.mark.proves("EXEC-12", "CONTRACT-11")
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_functions_of_a_provider_are_registered_called_and_exported_with_their_flags(
    tmp_path: Path, provider: Provider
) -> None:
    flags = {} if provider == "gemini" else {"strict": True, "defer_loading": True}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda _: json_answer("sunny")
        config: Json = {
            "declarations": {"tools": [declared(provider, "forecast", TAKES, **flags)]},
            "urls": [server.url],
            "allow_private": True,
        }
        report = await app.upstreams.add("fns", "functions", config, by=app.caller, overlay=READS)
        assert [(one.name, one.state) for one in report.tools] == [("forecast", "admitted")]
        result = await app.call("fns.forecast", city="Ulm")
        assert result.value == "sunny"
        assert [(got.method, got.path, orjson.loads(got.body)) for got in server.got] == [
            ("POST", "/forecast", {"city": "Ulm"})
        ]
        (record,) = records(app, result.invocation_id)
        assert record["phases"] == SIX
        assert record["externalMappings"][0]["function_name"] == "forecast"
        providers = Service(app).providers
        served = Service(app).tools.interface(await app.catalog.resolve("fns.forecast"))
        assert served["availability"]["deferred"] is bool(flags)
        for target in PROVIDERS:
            (told,), _ = await providers.declarations(target, app.caller)
            inner = told.get("function", told)
            # Chat completions have no deferred loading, and Gemini has neither; a field of ours would be refused there.
            known = {"openai-chat": ("strict",), "gemini": ()}.get(target, ("strict", "defer_loading"))
            for flag in ("strict", "defer_loading"):
                assert inner.get(flag, False) is (bool(flags) and flag in known), (target, flag)
            if not known:
                assert told.keys() == {"name", "description", "parametersJsonSchema"}
        kept = (await app.catalog.resolve("fns.forecast")).contract.manifest.execution
        assert kept is not None
        assert {flag: kept.native.get(flag) for flag in flags} == flags, "the contract keeps both whatever the format"


@pytest.mark.shows("Function schemas of a provider", "call", "errors")
@pytest.mark.proves("EXEC-12")
async def test_a_function_has_the_lifecycle_of_every_tool(tmp_path: Path) -> None:
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda got: json_answer("done") if b"Ulm" in got.body else Answer(status=500, body=b"{}")
        config: Json = {
            "declarations": [declared("anthropic", "order", TAKES)], "urls": [server.url], "allow_private": True,
        }  # fmt: skip
        await app.upstreams.add("fns", "functions", config, by=app.caller)

        async def ran(city: str, key: str) -> Result:
            pending = await app.call("fns.order", city=city, key=key)
            assert pending.pending, "nobody called it harmless, so a person is asked"
            await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=APPROVER)
            return await app.call("fns.order", city=city, key=key)

        unfit = await app.call("fns.order", {"city": 5, "more": 1}, key="k0")
        assert unfit.error is not None
        assert unfit.error.code == "E3301"
        assert server.got == []
        done = await ran("Ulm", "k1")
        assert done.value == "done"
        again = await app.call("fns.order", city="Ulm", key="k1")
        assert (again.value, again.source) == ("done", "replay")
        failed = await ran("Bonn", "k2")
        assert failed.error is not None
        assert failed.state == "failed"
        assert failed.error.code == "E3502"
        told = [records(app, one.invocation_id)[0] for one in (unfit, done, again, failed)]
        assert [one["phases"] for one in told] == [[*SIX[:2], SIX[-1]], SIX, SIX, [*SIX[:4], SIX[-1]]]
        assert [one.get("error_code") for one in told] == ["E3301", None, None, "E3502"]
        assert told[1]["approvalTicketId"]
        assert told[3]["approvalTicketId"]
        assert sum(b"Ulm" in got.body for got in server.got) == 1


@pytest.mark.proves("EXEC-12")
def test_functions_are_registered_and_exported_on_the_command_line(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([declared("anthropic", "forecast", TAKES, strict=True, defer_loading=True)]))
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("defaults: {mutation_class: write_irreversible}")
    where = ("--url", "http://127.0.0.1:9", "--allow-private", "--overlay", str(overlay))
    added = cli("upstream", "add", "functions", "fns", str(file), *where)
    assert added.code == 0, added.err
    told = json.loads(cli("tools", "export", "--format", "anthropic", "fns.forecast").out)
    assert (told[0]["name"], told[0]["strict"], told[0]["defer_loading"]) == ("fns__forecast", True, True)
    file.write_text("just text")
    assert cli("upstream", "add", "functions", "other", str(file), *where).code == 2


KINDS: list[Json] = [
    {"type": "string", "description": "A text."},
    {"type": "integer", "minimum": 0, "description": "A number."},
    {"type": "array", "items": {"type": "boolean"}, "description": "Some flags."},
]


@pytest.mark.proves("EXEC-12")
@settings(max_examples=60)
@given(
    parts=st.dictionaries(st.sampled_from("abcd"), st.sampled_from(KINDS), max_size=4),
    provider=st.sampled_from(PROVIDERS[:3]),
    flags=st.fixed_dictionaries({}, optional={"strict": st.booleans(), "defer_loading": st.booleans()}),
)
def test_what_is_imported_is_exported_and_imported_again_as_it_was(
    parts: Json, provider: Provider, flags: dict[str, bool]
) -> None:
    schema: Json = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
    (one,) = functions.read(declared(provider, "forecast", schema, **flags), "/{function}").tools
    (imported,) = import_all([one], upstream="fns", kind="functions", versions="1.0.0", overlay=parse_overlay(READS))
    assert imported.manifest is not None, imported.refused
    told = formats.declare(contract_of(imported.manifest), "openai-responses")
    (again,) = formats.definitions(told).tools
    assert again.native["strict"] is flags.get("strict", False)
    assert again.native.get("defer_loading", False) is flags.get("defer_loading", False)
    assert again.input_schema["properties"].keys() == parts.keys()
    assert again.input_schema["required"] == list(parts)
    if not flags.get("strict"):
        assert again.input_schema == schema


def nested(deep: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(deep):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


HOSTILE: dict[str, Json] = {
    "deep": nested(220),
    "huge": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(8000)}},
    "long": {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 200_000}}},
    "remote": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}},
    "pattern": {"type": "object", "patternProperties": {"((a{1000}){1000}){1000}": {"type": "string"}}},
    "kind": {"type": "array"},
}


@pytest.mark.proves("EXEC-12")
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_schema_is_refused_with_a_reason_and_the_others_are_served(tmp_path: Path, name: str) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        document: list[Any] = [declared("anthropic", name, HOSTILE[name]), declared("anthropic", "good", TAKES)]
        config: Json = {"declarations": document, "urls": ["https://functions.example.com"]}
        async with loop_is_free():
            report = await app.upstreams.add("fns", "functions", config, by=app.caller)
        states = {one.name: (one.state, one.reason) for one in report.tools}
        assert states["good"][0] == "admitted"
        assert states[name][0] == "refused"
        assert states[name][1]


async def test_a_schema_that_refers_to_itself_is_taken_or_refused_without_holding_anybody(tmp_path: Path) -> None:
    loops: Json = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#"}}}
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {
            "declarations": [declared("anthropic", "loops", loops)],
            "urls": ["https://functions.example.com"],
        }
        async with loop_is_free():
            report = await app.upstreams.add("fns", "functions", config, by=app.caller)
        assert report.tools[0].state in ("admitted", "refused")


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        [declared("anthropic", "deep", nested(400))],
        [[[[[[[[{"name": "a"}]]]]]]]],
        [{"name": f"f{n}", "description": "x" * 500} for n in range(5000)],
    ],
)
async def test_a_document_without_functions_or_with_too_much_is_refused(tmp_path: Path, document: Any) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {"declarations": document, "urls": ["https://functions.example.com"]}
        with pytest.raises(Failure) as refused:
            await app.upstreams.add("fns", "functions", config, by=app.caller)
        assert refused.value.code == "E3004"


# What functions share with every HTTP service


@pytest.mark.shows("Function schemas of a provider", "credentials", "retries of reads")
async def test_behind_interlock_breaker_limit_and_credential_apply_to_a_function(tmp_path: Path) -> None:
    async with HttpServer.open() as server:
        server.otherwise = lambda _: json_answer("sunny")
        takes: Json = {**TAKES, "required": []}
        config: Json = {"declarations": [declared("anthropic", "forecast", takes)], "urls": [server.url]}

        def fail() -> None:
            server.otherwise = lambda _: Answer(status=503)

        await governed(tmp_path, "functions", config, tool="forecast", asked=lambda: len(server.got), fail=fail)
    assert {got.headers["authorization"] for got in server.got} == {"Bearer s3cret"}


@pytest.mark.shows("Function schemas of a provider", "results bounded", "deadline", "no resent writes")
@pytest.mark.parametrize(
    ("answer", "code"),
    [(Answer(body=b'"' + b"x" * 100_000 + b'"'), "E3416"), (Answer(hang=True), "E3503"), (Answer(cut=True), "E3502")],
    ids=["too large", "too slow", "cut off"],
)
async def test_a_function_that_writes_is_sent_once_and_its_answer_bounded(answer: Answer, code: str) -> None:
    async with HttpServer.open() as server:
        server.otherwise = lambda _: answer
        config = functions.FunctionsConfig.from_document(
            {
                "declarations": [declared("anthropic", "forecast", TAKES)],
                "urls": [server.url],
                "allow_private": True,
                "max_response_bytes": 1000,
            }
        )
        one = functions.FunctionsUpstream("fns", config, clock=Clock())
        try:
            (found,) = (await one.discover()).tools
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(found.native, {"city": "Ulm"}, writes=True, key="k", left_s=1.0))
        finally:
            await one.close()
    assert (caught.value.code, len(server.got)) == (code, 1)
