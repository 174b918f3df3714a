"""Writes of HTTP services for the version that was read: ETags and If-Match, from the overlay to the service."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Interlock
from interlock.data.schema import Json
from tests.support.answers import Wish
from tests.support.calls import code, records
from tests.support.upstream_servers import Answer, Got, HttpServer
from tests.support.wires import DOORS, wired

PROVES = pytest.mark.proves("EFFECT-06")
ROUNDS = 100
AT_ONCE = 20

TEXT: Json = {"type": "string", "description": "what it says", "examples": ["hello"]}
ID: Json = {"type": "string", "description": "name of a document", "examples": ["trial"]}
DOCUMENT: Json = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Documents:
    """A service with documents, their ETags, and the rules of RFC 9110 on them.

    A document that is taken away (DELETE) is again what it was before its last change.
    """

    def __init__(self, server: HttpServer) -> None:
        self.stored: dict[str, tuple[int, str]] = {"trial": (1, "before")}
        self.earlier: dict[str, str | None] = {}
        # The ETags of versions that have one of their own form.
        self.tags: dict[int, str] = {}
        self.demands = False
        # The answers to a read of what is not there, and to a write for a version of it.
        self.unread, self.unwritten = 404, 412
        # Whether the answer to a write tells the version that it has made.
        self.tells = True
        # The answers to the next writes are lost, after they were made.
        self.losing = 0
        self.writes: list[Got] = []
        # Compresses where it may, and gives what is compressed a tag of its own.
        self.compressed: str | None = None
        self.server = server
        server.otherwise = self.answer

    def answer(self, got: Got) -> Answer:
        plain = self._answer(got)
        tag = plain.headers.get("etag", "").strip('"')
        if self.compressed is None or not tag or "gzip" not in got.headers["accept-encoding"]:
            return plain
        headers = {"etag": self.compressed.format(tag), "content-encoding": "gzip"}
        return replace(plain, body=gzip.compress(plain.body), headers=headers)

    def _answer(self, got: Got) -> Answer:
        name = got.path.rpartition("/")[2]
        found = self.stored.get(name)
        if got.method in ("GET", "HEAD"):
            return Answer(self.unread, b'{"why": "there is none"}') if found is None else self._shown(name)
        if got.method not in ("PUT", "DELETE"):
            return Answer()
        self.writes.append(got)
        wanted, absent = got.headers.get("if-match"), got.headers.get("if-none-match")
        if self.demands and wanted is None and absent is None:
            return Answer(428, b'{"why": "say which version"}')
        if wanted is not None and found is None:
            return Answer(self.unwritten, b'{"why": "there is none"}')
        if absent == "*" and found is not None:
            return Answer(412)
        if found is not None and wanted not in (None, "*", self.tag(found[0])):
            return Answer(412, b'{"why": "it is another"}')
        self._change(name, orjson.loads(got.body)["text"] if got.method == "PUT" else self.earlier.get(name))
        if self.losing:
            self.losing -= 1
            return Answer(status=0)
        return self._shown(name) if self.tells else replace(self._shown(name), headers={})

    def _change(self, name: str, text: str | None) -> None:
        found = self.stored.get(name)
        self.earlier[name] = None if found is None else found[1]
        if text is None:
            self.stored.pop(name, None)
        else:
            self.stored[name] = (1 if found is None else found[0] + 1, text)

    def _shown(self, name: str) -> Answer:
        if name not in self.stored:
            return Answer(body=orjson.dumps({"text": "it is gone"}))
        version, text = self.stored[name]
        return Answer(body=orjson.dumps({"text": text}), headers={"etag": self.tag(version)})

    def tag(self, version: int) -> str:
        return self.tags.get(version, f'"v{version}"')


def _configured(url: str, how: str) -> Json:
    """The service, with its operations in an OpenAPI document or described by hand."""
    if how == "described":
        taken: Json = {"type": "object", "properties": {"id": ID}, "required": ["id"]}
        given: Json = {"type": "object", "properties": {"id": ID, "text": TEXT}, "required": ["id", "text"]}
        common: Json = {"path": "/docs/{id}", "output_schema": DOCUMENT}
        tools: list[Json] = [
            {"name": "read", "method": "GET", "description": "A document of the shelf.", "input_schema": taken},
            {"name": "write", "method": "PUT", "description": "Write a document.", "input_schema": given},
            {"name": "remove", "method": "DELETE", "description": "Take a document away.", "input_schema": taken},
        ]
        return {"urls": [url], "allow_private": True, "tools": [{**common, **one} for one in tools]}
    ok: Json = {"200": {"description": "it", "content": {"application/json": {"schema": DOCUMENT}}}}
    place: Json = {"name": "id", "in": "path", "required": True, "schema": ID, "description": "its name"}
    body: Json = {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}
    header: Json = {"name": "If-Match", "in": "header", "schema": {"type": "string"}, "description": "an entity tag"}
    operations: Json = {
        "get": {
            "operationId": "read", "summary": "A document of the shelf.", "parameters": [place], "responses": ok,
        },
        "put": {
            "operationId": "write", "summary": "Write a document.", "responses": ok,
            "parameters": [place, header] if how == "openapi with the header" else [place],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        },
        "delete": {
            "operationId": "remove", "summary": "Take a document away.", "parameters": [place], "responses": ok,
        },
    }  # fmt: skip
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Docs", "version": "1"},
        "paths": {"/docs/{id}": operations},
    }
    return {"urls": [url], "allow_private": True, "openapi": document}


# Without a recipe for undoing, nothing is read before the write is sent.
IRREVERSIBLE: Json = {"mutation_class": "write_irreversible", "undo": None}
# The undo restores what was there before, and needs no image of it.
RESTORED: Json = {
    "before": {"tool": "read", "arguments": {"id": "/input/id"}}, "tool": "remove", "arguments": {"id": "/input/id"},
    "example": {"id": "trial", "text": "a trial"},
}  # fmt: skip
HOW = ["described", "openapi", "openapi with the header"]


def _overlay(argument: str = "seen", **more: Any) -> Json:
    write: Json = {
        "mutation_class": "write_reversible", "effects": [{"resource": "doc:{id}", "operation": "UPDATE"}],
        "if_match": {"argument": argument, "read_by": "read"},
        "undo": {
            "before": {"tool": "read", "arguments": {"id": "/input/id"}}, "tool": "write",
            "arguments": {"id": "/input/id", "text": "/before/text"}, "example": {"id": "trial", "text": "a trial"},
        },
    }  # fmt: skip
    remove: Json = {**write, "if_match": {"argument": "seen", "read_by": "read"}}
    remove["undo"] = {**write["undo"], "example": {"id": "trial"}}
    return {"tools": {"read": {"mutation_class": "read_only"}, "write": {**write, **more}, "remove": remove}}


async def _added(app: Interlock, url: str, how: str = "described", **more: Any) -> None:
    argument = "If-Match" if how == "openapi with the header" else "seen"
    report = await app.upstreams.add(
        "shelf", "http", _configured(url, how), by=app.caller, overlay=_overlay(argument, **more)
    )
    assert [one.state for one in report.tools] == ["admitted"] * 3, report.tools


@asynccontextmanager
async def shelf(home: Path, how: str = "described", **more: Any) -> AsyncGenerator[tuple[Interlock, Documents]]:
    async with HttpServer.open() as server, Interlock.open(home, housekeeping=False) as app:
        documents = Documents(server)
        await _added(app, server.url, how, **more)
        documents.writes.clear()
        yield app, documents


async def _told(app: Interlock, name: str) -> str | None:
    """The version of a document as a caller reads it; None if it has none."""
    result = await app.call("shelf.read", id=name)
    assert result.ok, result.error
    return result.envelope()["provenance"]["dataVersion"]


async def _version(app: Interlock, name: str) -> str:
    version = await _told(app, name)
    assert isinstance(version, str)
    return version


@PROVES
@pytest.mark.parametrize("how", HOW)
async def test_a_write_is_for_the_version_that_was_read_and_the_service_compares(tmp_path: Path, how: str) -> None:
    seen = "If-Match" if how == "openapi with the header" else "seen"
    async with shelf(tmp_path, how) as (app, documents):

        async def write(text: str, key: str, version: str | None = None) -> str | None:
            given = {"id": "plan", "text": text, **({} if version is None else {seen: version})}
            result = await app.call("shelf.write", given, key=key)
            if result.error is not None:
                assert (await app.call("shelf.write", given, key=key)).error is not None
                (closed, *_) = records(app, result.invocation_id)
                assert closed["outcome"] == "released"
                assert not records(app, result.invocation_id, kind="mutation")
                assert result.error.details is not None
                assert result.error.details["status"] == 412
            return None if result.error is None else f"{result.error.code} {result.error.row.error_code}"

        documents.stored["plan"] = (7, "first")
        version = await _version(app, "plan")
        assert version == "v7"
        assert await write("second", "1", version) is None
        assert documents.writes[-1].headers["if-match"] == '"v7"'
        assert (documents.stored["plan"], await _version(app, "plan")) == ((8, "second"), "v8")
        assert await write("third", "2", version) == "E3410 CONFLICT"
        assert await write("third", "3", '"v7"') == "E3410 CONFLICT"
        assert documents.stored["plan"] == (8, "second")
        assert await write("second", "1", version) is None, "it is replayed, not judged by what it did itself"
        assert await write("third", "4", "*") is None
        assert await write("fourth", "5", "") == "E3411 PRECONDITION_FAILED"
        assert documents.writes[-1].headers["if-none-match"] == "*"
        assert await write("fourth", "6") is None, "whoever states nothing is asked nothing"
        assert documents.stored["plan"] == (10, "fourth")
        assert orjson.loads(documents.writes[-1].body).keys() == {"text"}, "the version is no part of the body"


@PROVES
@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ('"v7"', "v7"),
        ('W/"v7"', 'W/"v7"'),
        ('"7"', "7"),
        ('"*"', '"*"'),
        ('W/"*"', 'W/"*"'),
        ('""', '""'),
        ('W/""', 'W/""'),
        ('"W/v7"', '"W/v7"'),
        ('"v7-gzip\';,<>"', "v7-gzip';,<>"),
        ('"' + 250 * "x" + '"', 250 * "x"),
        ('W/"' + 250 * "x" + '"', 'W/"' + 250 * "x" + '"'),
    ],
)
async def test_an_entity_tag_is_sent_back_as_the_service_gave_it(tmp_path: Path, tag: str, told: str) -> None:
    """The service compares character by character, and a tag that looks like a wildcard is none."""
    async with shelf(tmp_path) as (app, documents):
        documents.tags[7] = tag

        async def write(key: str) -> str | None:
            result = await app.call("shelf.write", {"id": "plan", "text": key, "seen": told}, key=key)
            return None if result.error is None else result.error.row.error_code.value

        documents.stored["plan"] = (7, "first")
        assert await _told(app, "plan") == told
        assert await write("second") is None
        assert documents.writes[-1].headers["if-match"] == tag
        assert documents.stored["plan"] == (8, "second")
        assert await write("third") == "CONFLICT"
        assert documents.stored["plan"] == (8, "second")


@PROVES
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("tag", ['"{}-gzip"', 'W/"{}"'])
async def test_a_version_is_that_of_the_answer_before_it_is_compressed(tmp_path: Path, how: str, tag: str) -> None:
    """Servers give what they compress a tag of its own, and take none of these in a write."""
    seen = "If-Match" if how == "openapi with the header" else "seen"
    async with shelf(tmp_path, how) as (app, documents):
        documents.compressed = tag
        documents.stored["plan"] = (7, "first")
        given: Json = {"id": "plan", "text": "second", seen: await _version(app, "plan")}
        written = await app.call("shelf.write", given, key="1")
        assert written.ok, written.error
        given[seen] = written.envelope()["provenance"]["dataVersion"]
        assert (await app.call("shelf.write", given, key="2")).ok, "its own answer tells a version too"


@PROVES
@pytest.mark.parametrize("tag", ["*", "v7", "W/v7"])
async def test_a_tag_without_its_quotes_gets_them(tmp_path: Path, tag: str) -> None:
    async with shelf(tmp_path) as (app, documents):
        documents.tags[7] = tag
        documents.stored["plan"] = (7, "first")
        seen = await _version(app, "plan")
        await app.call("shelf.write", {"id": "plan", "text": "second", "seen": seen}, key="1")
        assert documents.writes[-1].headers["if-match"] == f'"{tag}"'


@PROVES
async def test_a_version_may_be_read_by_its_head_alone(tmp_path: Path) -> None:
    overlay = _overlay()
    overlay["tools"]["write"] |= {"if_match": {"argument": "seen", "read_by": "peek"}}
    overlay["tools"]["peek"] = {"mutation_class": "read_only"}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        documents, config = Documents(server), _configured(server.url, "described")
        read, *others = config["tools"]
        peek = {**read, "name": "peek", "method": "HEAD", "output_schema": {"type": "null"}}
        config["tools"] = [read, *others, peek]
        report = await app.upstreams.add("shelf", "http", config, by=app.caller, overlay=overlay)
        assert {one.state for one in report.tools} == {"admitted"}, report.tools
        documents.stored["plan"] = (7, "first")
        seen = (await app.call("shelf.peek", id="plan")).envelope()["provenance"]["dataVersion"]
        assert seen == "v7"
        assert (await app.call("shelf.write", {"id": "plan", "text": "second", "seen": seen}, key="1")).ok
        stale = await app.call("shelf.write", {"id": "plan", "text": "third", "seen": seen}, key="2")
        assert (code(stale), documents.stored["plan"]) == ("E3410", (8, "second"))


@PROVES
async def test_a_redirected_read_tells_no_version_to_write_for(tmp_path: Path) -> None:
    """A tag belongs to one address: when it is written, the redirect may lead to another document with this tag."""
    async with shelf(tmp_path) as (app, documents):
        documents.stored["plan"] = (7, "first")
        asked = documents.answer

        def answer(got: Got) -> Answer:
            latest = got.method == "GET" and got.path == "/docs/latest"
            return Answer(302, headers={"location": "/docs/plan"}) if latest else asked(got)

        documents.server.otherwise = answer
        assert await _told(app, "latest") is None
        assert await _told(app, "plan") == "v7"


@PROVES
@pytest.mark.parametrize("tag", ['"a b"', '"é"', '"v7', '"v7", "v8"', 'w/"v7"', '"' + 251 * "x" + '"'])
async def test_a_tag_that_no_write_could_send_back_is_not_told_as_a_version(tmp_path: Path, tag: str) -> None:
    async with shelf(tmp_path) as (app, documents):
        documents.tags[7] = tag
        documents.stored["plan"] = (7, "first")
        assert await _told(app, "plan") is None


@PROVES
async def test_what_must_be_there_and_is_not_is_a_failed_precondition(tmp_path: Path) -> None:
    async with shelf(tmp_path, **IRREVERSIBLE) as (app, documents):
        given: Json = {"id": "none", "text": "a", "seen": "*"}
        pending = await app.call("shelf.write", given, key="1")
        reviewer = replace(app.caller, id="local:reviewer", groups=frozenset({"approvers"}))
        await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=reviewer)
        refused = await app.call("shelf.write", given, key="1")
        assert code(refused) == "E3411"
        assert documents.writes[-1].headers["if-match"] == "*"
        assert "none" not in documents.stored


@PROVES
@pytest.mark.parametrize("status", [404, 410])
@pytest.mark.parametrize("how", HOW)
async def test_a_reversible_write_of_what_is_gone_ends_by_the_version_that_it_states(
    tmp_path: Path, how: str, status: int
) -> None:
    """Its undo reads what is there first, and finds nothing."""
    seen = "If-Match" if how == "openapi with the header" else "seen"
    async with shelf(tmp_path, how) as (app, documents):
        documents.unread = status
        documents.stored["plan"] = (7, "first")
        given: Json = {"id": "plan", "text": "second", seen: await _version(app, "plan")}
        del documents.stored["plan"]

        async def write(key: str, **stated: str) -> str:
            result = await app.call("shelf.write", {**given, **stated}, key=key)
            assert result.error is not None
            (closed, *_) = records(app, result.invocation_id)
            assert not records(app, result.invocation_id, kind="mutation")
            assert result.error.details is not None
            assert result.error.details["status"] == status
            return f"{result.error.code} {closed['outcome']}"

        assert await write("1") == "E3410 released"
        assert await write("2", **{seen: "*"}) == "E3411 released"
        assert await write("3", **{seen: ""}) == "E3411 released", "its undo could not remove what it created"
        del given[seen]
        assert await write("4") == "E3401 done", "whoever states nothing has no condition that fails"
        assert (documents.writes, documents.stored.get("plan")) == ([], None)
        documents.stored["plan"] = (7, "first")
        again = await app.call("shelf.write", {**given, seen: "v7"}, key="1")
        assert again.ok, "a refused call has not used its key up"


@PROVES
async def test_what_must_not_exist_yet_is_created_where_the_undo_can_remove_it(tmp_path: Path) -> None:
    async with shelf(tmp_path, undo=RESTORED) as (app, documents):
        given: Json = {"id": "plan", "text": "first", "seen": ""}
        created = await app.call("shelf.write", given, key="1")
        assert created.ok, created.error
        assert documents.stored["plan"] == (1, "first")
        assert (await app.undo(created.invocation_id, key="undo")).ok
        assert "plan" not in documents.stored


@PROVES
async def test_a_creation_that_could_not_be_undone_says_so_and_is_not_made(tmp_path: Path) -> None:
    async with shelf(tmp_path) as (app, documents):
        refused = await app.call("shelf.write", {"id": "plan", "text": "first", "seen": ""}, key="1")
        assert refused.error is not None
        assert "there is nothing yet, as the call demands, but it could not be undone" in str(refused.error)
        assert "write_irreversible" in refused.error.resolution
        assert documents.writes == []


@PROVES
@pytest.mark.parametrize("status", [412, 404, 410])
async def test_of_an_update_and_a_deletion_of_one_version_one_succeeds_and_the_other_conflicts(
    tmp_path: Path, status: int
) -> None:
    """Both are reversible, so both read what is there first: the service compares what has happened since.

    Services may answer 404 to a write for a version of what is not there, before they look at its conditions.
    """
    async with (
        HttpServer.open() as server,
        Interlock.open(tmp_path / "one", housekeeping=False) as one,
        Interlock.open(tmp_path / "two", housekeeping=False) as two,
    ):
        documents = Documents(server)
        for app in (one, two):
            await _added(app, server.url)
        documents.unwritten = status
        met: set[str] = set()

        async def race(number: int) -> None:
            name = f"d{number}"
            documents.stored[name] = (7, "before")
            seen = await _version(one, name)
            given: Json = {"id": name, "seen": seen}
            calls = {
                "update": one.call("shelf.write", {**given, "text": "A"}, key=name),
                "deletion": two.call("shelf.remove", given, key=name),
            }
            # Started in turn, so that each of them is ahead in some rounds.
            order = list(calls) if number % 2 else [*reversed(calls)]
            results = await asyncio.gather(*(calls[which] for which in order))
            ended = {
                which: "success" if result.error is None else result.error.row.error_code.value
                for which, result in zip(order, results, strict=True)
            }
            assert sorted(ended.values()) == ["CONFLICT", "success"], ended
            left = documents.stored.get(name)
            assert left == ((8, "A") if ended["update"] == "success" else None)
            met.add("A" if left else "gone")

        for start in range(0, ROUNDS, AT_ONCE):
            await asyncio.gather(*(race(number) for number in range(start, start + AT_ONCE)))
        assert met == {"A", "gone"}


@PROVES
@pytest.mark.parametrize("status", [404, 410])
async def test_a_write_that_finds_nothing_ends_by_the_version_that_it_states(tmp_path: Path, status: int) -> None:
    async with shelf(tmp_path) as (app, documents):
        documents.unwritten = status

        async def lost(key: str, seen: str) -> str | None:
            """Write what is taken away between the reading of what is there and the write itself."""
            documents.stored["plan"] = (7, "first")
            asked = documents.answer

            def answer(got: Got) -> Answer:
                answered = asked(got)
                if got.method == "GET":
                    documents.stored.pop("plan", None)
                return answered

            documents.server.otherwise = answer
            result = await app.call("shelf.write", {"id": "plan", "text": "second", "seen": seen}, key=key)
            documents.server.otherwise = asked
            return code(result)

        assert await lost("1", "v7") == "E3410"
        assert await lost("2", "*") == "E3411"
        assert len(documents.writes) == 2
        assert "plan" not in documents.stored


@PROVES
@pytest.mark.parametrize("apart", [True, False], ids=["two homes", "one home"])
async def test_of_two_writers_of_one_version_one_succeeds_and_the_other_conflicts(tmp_path: Path, apart: bool) -> None:
    """Two homes share no lock: only the service can tell their writes apart."""
    async with (
        HttpServer.open() as server,
        Interlock.open(tmp_path / "one", housekeeping=False) as one,
        Interlock.open(tmp_path / "two", housekeeping=False) as two,
    ):
        documents = Documents(server)
        for app in (one, two):
            await _added(app, server.url)

        async def race(number: int) -> None:
            name = f"d{number}"
            documents.stored[name] = (7, "before")
            writers = {"A": one, "B": two if apart else one}
            # Both read the same version; or the second states none.
            read = {body: await _version(app, name) for body, app in writers.items()}
            given = {body: {"seen": version} for body, version in read.items()}
            if number % 2 == 0:
                given["B"] = {}
            calls = [
                app.call("shelf.write", {"id": name, "text": body, **given[body]}, key=f"{body}{number}")
                for body, app in writers.items()
            ]
            results = await asyncio.gather(*calls)
            ended = {
                body: "success" if result.error is None else result.error.row.error_code.value
                for body, result in zip(writers, results, strict=True)
            }
            done = [body for body, end in ended.items() if end == "success"]
            assert set(ended.values()) <= {"success", "CONFLICT"}, ended
            assert len(done) == 1 or (number % 2 == 0 and len(done) == 2), ended
            version, text = documents.stored[name]
            assert version == 7 + len(done)
            assert text in done

        for start in range(0, ROUNDS, AT_ONCE):
            await asyncio.gather(*(race(number) for number in range(start, start + AT_ONCE)))


@PROVES
async def test_every_door_tells_a_conflict_from_a_failed_precondition(tmp_path: Path) -> None:
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        documents = Documents(server)
        await _added(app, server.url)
        async with wired(app) as wires:
            for door in DOORS:
                documents.stored[door] = (7, "before")

                async def ask(key: str, seen: str, door: str = door) -> tuple[str, str] | None:
                    wish = Wish("shelf.write", {"id": door, "text": door, "seen": seen}, key=f"{door}{key}")
                    told = await wires.rows[door].call(wish)
                    return None if told.error is None else told.error[:2]

                assert await ask("1", "v6") == ("E3410", "CONFLICT"), door
                assert await ask("2", "") == ("E3411", "PRECONDITION_FAILED"), door
                assert documents.stored[door] == (7, "before")
                assert await ask("3", "v7") is None, door
                assert documents.stored[door] == (8, door)


@PROVES
async def test_the_version_before_a_write_is_not_told_as_that_of_its_result(tmp_path: Path) -> None:
    """What is there first is read for the undo, and has a version of its own."""
    async with shelf(tmp_path) as (app, documents):
        documents.stored["plan"] = (7, "first")
        told: list[str | None] = []
        for documents.tells in (True, False):
            result = await app.call("shelf.write", {"id": "plan", "text": "second"}, key=str(documents.tells))
            told.append(result.envelope()["provenance"]["dataVersion"])
        assert told == ["v8", None]


@PROVES
async def test_a_write_for_one_version_is_not_sent_again_after_its_answer_was_lost(tmp_path: Path) -> None:
    """Sent again it would find its own version, and the refusal would say that nothing was done."""
    async with shelf(tmp_path, idempotent_by_key=True, restart_safe=False) as (app, documents):
        documents.stored["plan"] = (7, "first")
        documents.losing = 1
        lost = await app.call("shelf.write", {"id": "plan", "text": "second", "seen": "v7"}, key="1")
        assert lost.error is not None
        assert lost.error.row.error_code.value == "UPSTREAM_FAILURE"
        assert (len(documents.writes), documents.stored["plan"]) == (1, (8, "second"))
        documents.losing = 1
        again = await app.call("shelf.write", {"id": "plan", "text": "third"}, key="2")
        assert again.ok, "without a version, the key of the service makes a second try harmless"
        assert len(documents.writes) == 3


@PROVES
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("safe", ["idempotent_by_key", "restart_safe"])
async def test_the_outcome_of_a_write_for_one_version_is_unknown_after_its_answer_was_lost(
    tmp_path: Path, how: str, safe: str
) -> None:
    """Sent again under its key it would be told that nothing was done, and its caller would do it a second time."""
    seen = "If-Match" if how == "openapi with the header" else "seen"
    async with shelf(tmp_path, how, **{safe: True}) as (app, documents):
        documents.stored["plan"] = (7, "first")
        given = {"id": "plan", "text": "second", seen: "v7"}
        documents.losing = 1
        assert code(await app.call("shelf.write", given, key="1")) == "E3502"
        assert code(await app.call("shelf.write", given, key="1")) == "E3409"
        assert (len(documents.writes), documents.stored["plan"]) == (1, (8, "second"))
        # Without a version it may be sent again, as the operator has said.
        del given[seen]
        documents.losing = 10
        assert code(await app.call("shelf.write", given, key="2")) == "E3502"
        documents.losing = 0
        assert (await app.call("shelf.write", given, key="2")).ok


@PROVES
async def test_the_outcome_of_an_undo_for_one_version_is_unknown_after_its_answer_was_lost(tmp_path: Path) -> None:
    """The write states no version and may be sent again. What undoes it states one, which its own effect changes."""
    overlay = _overlay(restart_safe=True, undo=RESTORED)
    overlay["tools"]["remove"] = IRREVERSIBLE
    del overlay["tools"]["write"]["if_match"]
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        documents = Documents(server)
        configured = _configured(server.url, "described")
        configured["tools"][2]["headers"] = {"If-Match": '"v2"'}
        report = await app.upstreams.add("shelf", "http", configured, by=app.caller, overlay=overlay)
        assert [one.state for one in report.tools] == ["admitted"] * 3, report.tools
        documents.stored["plan"] = (1, "first")
        written = await app.call("shelf.write", {"id": "plan", "text": "second"}, key="1")
        assert written.ok, written.error
        documents.writes.clear()
        documents.losing = 10
        assert code(await app.undo(written.invocation_id, key="undo")) == "E3502"
        documents.losing = 0
        assert code(await app.undo(written.invocation_id, key="undo")) == "E3409"
        assert (len(documents.writes), documents.stored["plan"]) == (1, (3, "first"))


@PROVES
async def test_a_time_that_a_write_states_is_a_version_too(tmp_path: Path) -> None:
    """A hand-written operation sends If-Unmodified-Since."""
    told, later = "Tue, 17 Nov 2026 10:00:00 GMT", "Tue, 17 Nov 2026 11:00:00 GMT"
    since: Json = {"type": "string", "description": "When it was read.", "examples": [told]}
    tool: Json = {
        "name": "write", "method": "PUT", "description": "Write the one document.", "path": "/doc",
        "headers": {"If-Unmodified-Since": "{since}"},
        "input_schema": {"type": "object", "properties": {"text": TEXT, "since": since}, "required": ["text"]},
        "output_schema": {"type": "object"},
    }  # fmt: skip
    stated: Json = {
        "mutation_class": "write_reversible", "idempotent_by_key": True, "undo": {
            "tool": "write", "arguments": {"text": {"value": "before"}}, "example": {"text": "a trial"},
        },
    }  # fmt: skip
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {"urls": [server.url], "tools": [tool], "allow_private": True}
        report = await app.upstreams.add("one", "http", config, by=app.caller, overlay={"tools": {"write": stated}})
        assert [one.state for one in report.tools] == ["admitted"], report.tools
        server.got.clear()
        server.otherwise = lambda got: Answer(412 if got.headers.get("if-unmodified-since") == told else 0)
        assert code(await app.call("one.write", {"text": "a", "since": told}, key="1")) == "E3410"
        assert code(await app.call("one.write", {"text": "a", "since": later}, key="2")) == "E3502"
        assert code(await app.call("one.write", {"text": "a", "since": later}, key="2")) == "E3409"
        assert len(server.got) == 2, "it is not sent again after its answer was lost"


async def test_a_service_that_demands_a_version_says_so(tmp_path: Path) -> None:
    async with shelf(tmp_path) as (app, documents):
        documents.stored["plan"] = (3, "before")
        documents.demands = True
        refused = await app.call("shelf.write", {"id": "plan", "text": "a"}, key="1")
        assert (code(refused), documents.stored["plan"]) == ("E3411", (3, "before"))
        assert "only for a stated version" in str(refused.error)
        assert (await app.call("shelf.write", {"id": "plan", "text": "a", "seen": "v3"}, key="1")).ok


async def test_an_overlay_can_demand_a_version_of_every_write(tmp_path: Path) -> None:
    required: Json = {"argument": "seen", "read_by": "read", "required": True}
    async with shelf(tmp_path, if_match=required, **IRREVERSIBLE) as (app, documents):
        refused = await app.call("shelf.write", {"id": "trial", "text": "a"}, key="1")
        assert refused.error is not None
        assert refused.error.row.error_code.value == "INVALID_INPUT"
        assert "seen" in str(refused.error)
        assert documents.writes == []


async def test_what_no_read_could_have_returned_is_not_sent(tmp_path: Path) -> None:
    async with shelf(tmp_path) as (app, documents):
        for number, seen in enumerate(("a b", 'a"b', "a\r\nx: y", "é", " ", '"v7', 'W/"v 7"', '"v7","v8"')):
            refused = await app.call("shelf.write", {"id": "trial", "text": "a", "seen": seen}, key=f"k{number}")
            assert code(refused) == "E3308", seen
        assert documents.writes == []


@pytest.mark.parametrize(
    ("overlay", "reason"),
    [
        ({"tools": {"write": {"if_match": {"argument": "seen", "read_by": "look"}}}}, "not a tool of this upstream"),
        ({"tools": {"write": {"if_match": {"argument": "seen", "read_by": "read"}}}}, "mutation_class: read_only"),
        (_overlay("text"), "takes another `text`"),
        (
            {"tools": {"read": {"mutation_class": "read_only", "if_match": {"argument": "seen", "read_by": "read"}}}},
            "changes no version",
        ),
    ],
)
async def test_an_overlay_whose_version_nobody_can_read_keeps_the_tool_out(
    tmp_path: Path, overlay: Json, reason: str
) -> None:
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        Documents(server)
        config = _configured(server.url, "described")
        report = await app.upstreams.add("shelf", "http", config, by=app.caller, overlay=overlay)
        refused = [one for one in report.tools if one.state != "admitted"]
        assert any(reason in str(one.reason) for one in refused), report.tools
