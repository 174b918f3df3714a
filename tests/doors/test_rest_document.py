"""The REST door against its own document: what it says there is what it does, whatever it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
import uvicorn
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from interlock.core.errors import Failure
from interlock.doors.rest import rest_app
from interlock.doors.rest.invoke import FIELDS, LONGEST_MS, read
from interlock.doors.rest.models import InvokeBody
from interlock.http.asgi import MAX_BODY
from tests.support.rest import serving
from tests.thorough import THOROUGH

Json = dict[str, Any]
# Its types say less than strict checking wants.
schemathesis: Any = importlib.import_module("schemathesis")
checks: Any = importlib.import_module("schemathesis.specs.openapi.checks")
EXAMPLES = 100 if THOROUGH else 2  # of each operation, in each mode
# Whether a well-formed request is met depends on what is in the home, which no schema knows; and every request here
# carries a good token, so what happens without one is shown in test_rest.py.
NOT_ITS_AFFAIR = [checks.positive_data_acceptance, checks.ignored_auth]


@dataclass(frozen=True)
class Served:
    """The application on a socket of its own."""

    url: str
    home: str
    token: str
    document: Json


@pytest.fixture(scope="module")
def served(
    module_leaves_nothing_behind: None, prepared_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    home = Path(shutil.copytree(prepared_home, tmp_path_factory.mktemp("served") / "home"))
    listening = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    told: list[Any] = []

    async def serve() -> None:
        async with serving(home) as world:
            config = uvicorn.Config(rest_app(world.service), lifespan="off", ws="none", log_level="error")
            server = uvicorn.Server(config)
            told.extend((server, world.tokens["root"]))
            ready.set()
            await server.serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    server, token = told
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    yield Served(url, str(home), token, httpx.get(f"{url}/openapi.json", timeout=120).json())
    server.should_exit = True
    thread.join(30)


@pytest.mark.supports("OPS-01")
def test_whatever_is_sent_the_answer_is_one_that_the_document_describes(served: Served) -> None:
    schema = schemathesis.openapi.from_dict(served.document)
    schema.config.update(base_url=served.url, headers={"Authorization": f"Bearer {served.token}"})
    # A text longer than its maxLength may make the whole request too large, which is refused before it is parsed.
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, "413"]
    # Adding an upstream, and previewing that, goes out to the network; it has tests of its own.
    # The stream of events has no end; tests/doors/test_event_stream.py reads it.
    tried = schema.exclude(path="/v1/upstreams", method="POST").exclude(path="/v1/upstreams/preview")
    tried = tried.exclude(path="/v1/events")
    found = [result.ok() for result in tried.get_all_operations()]
    # Whoever replaces the policy may take every right away, so that comes last.
    operations = sorted(found, key=lambda operation: operation.label == "PUT /v1/policy")
    assert len(operations) > 30
    for operation in operations:
        _probe(operation, served)


def _probe(operation: Any, served: Served) -> None:
    for mode in schemathesis.GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        )  # fmt: skip
        def probe(case: Any) -> None:
            response = case.call(timeout=120)
            case.validate_response(response, excluded_checks=NOT_ITS_AFFAIR)
            if response.status_code == 413:
                assert response.json()["error"]["error_code"] == "E3309"
                assert len(response.request.body) > MAX_BODY
            for secret in (served.home, served.token, "Traceback"):
                assert secret not in response.text

        with contextlib.suppress(Unsatisfiable):  # an operation that takes nothing cannot be sent anything wrong
            probe()


@pytest.mark.supports("OPS-01")
def test_the_document_describes_every_operation_its_answers_and_who_may_ask(served: Served) -> None:
    document = served.document
    assert document["openapi"].startswith("3.1.")
    assert document["components"]["securitySchemes"] == {
        "HTTPBearer": {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "JWT",
            "description": "a capability token: interlock token issue",
        }
    }
    operations = [
        (path, one)
        for path, methods in document["paths"].items()
        for one in methods.values()
        if path.startswith("/v1/")
    ]
    for path, operation in operations:
        assert operation["security"] == [{"HTTPBearer": []}], path
        assert operation["description"], path
        assert {"400", "401", "403", "404", "413", "4XX", "5XX"} < operation["responses"].keys(), path
        assert any(status.startswith("2") for status in operation["responses"]), path
    names = [operation["operationId"] for _, operation in operations]
    assert len(names) == len(set(names))


def test_every_body_that_must_say_something_has_an_example(served: Served) -> None:
    schemas = served.document["components"]["schemas"]
    bodies = [schema for name, schema in schemas.items() if name.endswith("Body") and schema.get("required")]
    assert bodies
    for schema in bodies:
        (example,) = schema["examples"]
        assert set(schema.get("properties", example)) >= example.keys() >= {*schema["required"]}


def test_the_page_is_made_from_the_document_and_fetches_nothing(served: Served) -> None:
    answer = httpx.get(f"{served.url}/docs", timeout=60)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    for path in served.document["paths"]:
        assert f"<code>{path}</code>" in answer.text
    for word in ("<script", "src=", "http://", "url(", "<link"):
        assert word not in answer.text


# The invoke route reads its bodies by hand; what it takes must be what the document says it takes.

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**9), st.floats(allow_nan=False), st.text(max_size=5),
    st.sampled_from(["sync", "async"]), st.lists(st.none(), max_size=1), st.just({}), st.just({"a": 1}),
)  # fmt: skip


def test_the_hot_route_and_the_document_name_the_same_fields() -> None:
    assert FIELDS.keys() == InvokeBody.model_fields.keys()


@given(st.dictionaries(st.sampled_from([*FIELDS, "other"]), ANYTHING))
@example({"tool_id": "x", "timeout_ms": LONGEST_MS + 1})
@example({"tool_id": "x" * 601})
def test_the_hot_route_takes_what_the_document_says_and_nothing_else(document: Json) -> None:
    try:
        InvokeBody.model_validate(document)
    except pydantic.ValidationError:
        with pytest.raises(Failure) as refused:
            read(document, None, None)
        assert refused.value.code == "E3004"
    else:
        ask, in_background = read(document, None, None)
        assert (ask.tool, in_background) == (document["tool_id"], document.get("execution_mode") == "async")


@pytest.mark.parametrize("path", ["/v1/audit/records", "/v1/calls"])
def test_a_time_is_written_out_as_the_document_says(served: Served, path: str) -> None:
    headers = {"Authorization": f"Bearer {served.token}"}
    for since, status in (("1194185428", 400), ("2026-11-16", 400), ("2026-11-16T18:00:00Z", 200)):
        answer = httpx.get(f"{served.url}{path}", params={"since": since}, headers=headers, timeout=120)
        assert answer.status_code == status, (since, answer.text)
