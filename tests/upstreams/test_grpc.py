"""gRPC services as upstreams: found by reflection, called by what was pinned, and never asked twice in vain."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import jsonschema_rs
import orjson
import pydantic
import pytest

from interlock.call.connector import Definition
from interlock.core.errors import Failure
from interlock.data.schema import Json, Schema
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.upstreams.grpc import GrpcUpstream
from interlock.upstreams.grpc_config import GrpcConfig
from interlock.upstreams.protobuf import definitions
from tests.support.grpc_upstreams import found_in, upstream
from tests.support.upstream_servers import (
    TRACEPARENT,
    Asked,
    ShopServer,
    Tap,
    governed,
    new_certificate,
    remote_call,
    services_of,
)
from tests.support.wires import WIRES, opened


async def failure_of(one: GrpcUpstream, native: Json, **facts: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        await one.call(remote_call(native, **facts))
    return caught.value


@pytest.mark.shows("gRPC", "discovery")
async def test_reflection_offers_what_takes_one_request_and_says_why_not_the_rest(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        found = await one.discover()
        await one.probe()
    by_name = {tool.name: tool for tool in found.tools}
    assert set(by_name) == {f"shop.v1.Shop.{name}" for name in ("Get", "Put", "List", "Echo")}
    refused = dict(found.refused)
    assert "client streaming" in refused.pop("shop.v1.Shop.Upload")
    assert "bidirectional streaming" in refused.pop("shop.v1.Shop.Chat")
    assert refused == {}
    assert by_name["shop.v1.Shop.Get"].hints == {"readOnlyHint": True}
    assert by_name["shop.v1.Shop.Put"].hints == {}
    assert by_name["shop.v1.Shop.Get"].input_schema == {
        "type": "object",
        "properties": {"thing_id": {"type": "integer"}, "note": {"type": "string"}},
        "additionalProperties": False,
    }
    thing = by_name["shop.v1.Shop.Put"].input_schema
    assert thing["properties"]["parts"]["items"] == {"$ref": "#/$defs/shop.common.Thing"}
    named = {"type": "string", "enum": ["SIZE_UNSPECIFIED", "LARGE"]}
    assert thing["properties"]["size"] == {"anyOf": [named, {"type": "integer"}]}


async def test_a_pin_holds_nothing_but_what_its_method_needs(tmp_path: Path) -> None:
    import base64
    import zlib

    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        tools = await found_in(one)
    pin = zlib.decompress(base64.b64decode(tools["Put"].native["descriptors"]))
    assert b"Thing" in pin
    assert not any(word in pin for word in (b"NotUsed", b"Everything", b"Shop", b"Unrelated"))


@pytest.mark.shows("gRPC", "call")
@pytest.mark.proves("OBS-02")
@pytest.mark.part_of(
    "AUTH-09",
    rest="upstreams that are not on one's own networks only with send_caller",
)
@pytest.mark.proves("EXEC-09")
@pytest.mark.proves("LIFE-10")
async def test_a_call_carries_arguments_trace_deadline_key_and_credential(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path, reflection=True) as server:
        async with upstream(server.port) as one:
            tools = await found_in(one)
        # A call needs no reflection: another connector that never looked makes it.
        async with upstream(server.port, auth={"kind": "bearer", "secret": "T"}, headers={"x-team": "a"}) as one:
            call = remote_call(tools["Get"].native, {"thing_id": 7}, credentials={"T": "s3cret"}, left_s=20)
            assert await one.call(call) == {"id": "7", "name": "seven", "parts": [], "size": "LARGE"}
            write: Json = {"arguments": {"name": "x"}, "credentials": {"T": "s3cret"}, "writes": True, "key": "k1"}
            await one.call(remote_call(tools["Put"].native, **write))
            assert (await failure_of(one, tools["Get"].native)).code == "E3602"
    read, wrote = server.asked
    assert read.message.thing_id == 7
    assert (read.metadata["traceparent"], read.metadata["tracestate"]) == (TRACEPARENT, "vendor=value")
    assert read.metadata["authorization"] == "Bearer s3cret"
    assert read.metadata["x-team"] == "a"
    assert "idempotency-key" not in read.metadata
    assert read.metadata["x-interlock-caller"] == "ada"
    assert 0 < read.left_s <= 20
    assert 15_000 < int(read.metadata["x-interlock-deadline-ms"]) <= 20_000
    assert wrote.message.name == "x"
    assert wrote.metadata["idempotency-key"]


@pytest.mark.proves("EXEC-09")
async def test_a_target_that_the_caller_may_not_reach_is_not_asked(tmp_path: Path) -> None:
    judged: list[tuple[str, int]] = []

    def objection(host: str, port: int) -> str:
        judged.append((host, port))
        return "not for this agent"

    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        get = (await found_in(one))["Get"].native
        asked = len(server.asked)
        failure = await failure_of(one, get, arguments={"thing_id": 7}, objection=objection)
        assert (failure.code, len(server.asked)) == ("E3406", asked)
    assert [port for _, port in judged] == [server.port]


async def test_every_kind_of_field_goes_there_and_back_within_its_schemas(tmp_path: Path) -> None:
    arguments: Json = {
        "i32": -5, "u32": 5, "i64": -(2**60), "u64": 2**60, "s64": -1, "f32": 9, "small": 0.5, "large": 1e300,
        "flag": True, "text": "grüße", "raw": "AAE=", "colour": "RED", "inner": {"yes": True}, "words": ["a", "b"],
        "by_name": {"x": {"yes": False}}, "right": 3, "at": "2026-11-15T09:00:00Z", "maybe": "so",
        "free": {"deep": [1, None, {"er": "x"}]}, "any_value": [1, "two"],
    }  # fmt: skip
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        echo = (await found_in(one))["Echo"]
        value = await one.call(remote_call(echo.native, arguments))
        empty = await one.call(remote_call(echo.native, {}))
    jsonschema_rs.validator_for(echo.input_schema).validate(arguments)
    assert echo.output_schema is not None
    given = jsonschema_rs.validator_for(echo.output_schema)
    given.validate(value)
    given.validate(empty)
    assert value == {**arguments, "i64": str(-(2**60)), "u64": str(2**60), "s64": "-1"}
    assert empty["words"] == []
    assert "inner" not in empty


async def test_a_method_that_was_pinned_with_the_names_of_the_json_form_keeps_them(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        now = (await found_in(one))["Echo"].native
        older = {name: part for name, part in now.items() if name != "names"}
        sent = {"byName": {"x": {"yes": True}}}
        for native, name in ((older, "byName"), (now, "by_name")):
            value = await one.call(remote_call(native, sent))
            assert value[name] == {"x": {"yes": True}}, "the message takes both forms"


async def test_arguments_that_no_message_holds_are_not_sent(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        echo = (await found_in(one))["Echo"].native
        for arguments in ({"i32": 2**40}, {"nothing": 1}, {"left": "a", "right": 1}, {"colour": "BLUE"}):
            assert (await failure_of(one, echo, arguments=arguments)).code == "E3301"
    assert server.asked == []


async def test_streamed_answers_are_collected_and_bounded(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server:
        async with upstream(server.port) as one:
            listing = (await found_in(one))["List"]
            value = await one.call(remote_call(listing.native, {"thing_id": 3}))
            assert listing.output_schema is not None
            jsonschema_rs.validator_for(listing.output_schema).validate(value)
            assert [thing["id"] for thing in value["messages"]] == ["7", "7", "7"]
        async with upstream(server.port, max_response_bytes=100) as one:
            assert (await failure_of(one, listing.native, arguments={"thing_id": 500})).code == "E3416"


@pytest.mark.parametrize(
    ("kind", "code"),
    [("metadata", "E3416"), ("trailers", "E3416"), ("details", "E3416"), ("their limit", "E3401"), ("rate", "E3504")],
)
async def test_a_limit_of_size_is_no_limit_of_rate(tmp_path: Path, kind: str, code: str) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        get = (await found_in(one))["Get"].native

        async def answer(_: Asked, context: Any) -> Any:
            long = (("x-long", "y" * 100_000),)
            if kind == "metadata":
                await context.send_initial_metadata(long)
            elif kind == "trailers":
                context.set_trailing_metadata(long)
            else:
                words = {"details": "z" * 50_000, "rate": "slow down"}
                theirs = "SERVER: Received message larger than max (9 vs. 4)"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words.get(kind, theirs))
            return server.message("shop.common.Thing")()

        server.answer = answer
        failure = await failure_of(one, get, attempts=1)
        assert failure.code == code, failure.message
        assert len(server.asked) == 1
        assert len(failure.message) < 600


@pytest.mark.shows("gRPC", "results bounded")
async def test_an_oversized_answer_is_not_held(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as looking:
        get = (await found_in(looking))["Get"].native

        async def large(_: Asked, __: Any) -> Any:
            return server.message("shop.common.Thing")(name="x" * 10_000)

        server.answer = large
        async with upstream(server.port, max_response_bytes=1000) as one:
            failure = await failure_of(one, get)
    assert failure.code == "E3416"
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, "E3502"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "E3503"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "E3504"),
        (grpc.StatusCode.INVALID_ARGUMENT, "E3401"),
        (grpc.StatusCode.INTERNAL, "E3502"),
        (grpc.StatusCode.UNKNOWN, "E3502"),
        (grpc.StatusCode.DATA_LOSS, "E3502"),
        (grpc.StatusCode.NOT_FOUND, "E3401"),
        (grpc.StatusCode.UNIMPLEMENTED, "E3401"),
    ],
)
@pytest.mark.proves("EXEC-09")
async def test_every_status_has_its_code(tmp_path: Path, status: grpc.StatusCode, code: str) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        get = (await found_in(one))["Get"].native

        async def refuse(_: Asked, context: Any) -> Any:
            await context.abort(status, "no: s3cret", (("grpc-retry-pushback-ms", "1500"),))

        server.answer = refuse
        failure = await failure_of(one, get, attempts=1, credentials={"T": "s3cret"})
    assert failure.code == code
    named = {"E3502": "UPSTREAM_FAILURE", "E3503": "UPSTREAM_FAILURE", "E3504": "RATE_LIMITED"}
    assert failure.row.error_code == named.get(code, "EXECUTION_FAILED")
    assert failure.retry_after_ms == (1500 if code == "E3504" else None)
    assert "s3cret" not in repr(failure.envelope("t"))


@pytest.mark.shows("gRPC", "errors")
async def test_status_message_and_details_of_a_service_reach_the_caller(tmp_path: Path) -> None:
    """Over the gRPC endpoint NOT_FOUND stays NOT_FOUND; a refusal that would be about the endpoint does not."""
    from google.rpc.error_details_pb2 import ResourceInfo
    from google.rpc.status_pb2 import Status

    said: list[grpc.StatusCode] = []

    async def refuse(_: Asked, context: Any) -> Any:
        status = Status(code=said[0].value[0])
        status.details.add().Pack(ResourceInfo(resource_name="thing-9"))
        await context.abort(said[0], "no thing 9", (("grpc-status-details-bin", status.SerializeToString()),))

    async with ShopServer.open(tmp_path) as server, opened(tmp_path / "home") as wires:
        config = {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True, "allow_private": True}
        overlay = {"defaults": {"mutation_class": "read_only"}}
        report = await wires.app.upstreams.add("shop", "grpc", config, by=wires.app.caller, overlay=overlay)
        get = next(one for one in report.tools if one.name == "shop.v1.Shop.Get")
        assert get.state == "admitted", get.reason
        server.answer = refuse
        for status, expected in (
            ("NOT_FOUND", "NOT_FOUND"), ("UNAUTHENTICATED", "INTERNAL"), ("UNAVAILABLE", None),
            ("DEADLINE_EXCEEDED", None), ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
        ):  # fmt: skip
            said[:] = [grpc.StatusCode[status]]
            heard = await wires.call("grpc", get.address, {})
            assert expected in (None, heard.status), heard
            assert heard.envelope is not None
            assert "no thing 9" in heard.envelope["message"]
            assert "thing-9" in str(heard.envelope["details"])
            assert heard.envelope["details"]["status"] == status


async def test_a_deadline_of_a_service_keeps_its_words_and_one_of_ours_stays_ours(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def late(_: Asked, context: Any) -> Any:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the warehouse did not answer")

    async def silent(asked: Asked, _: Any) -> Any:
        await release.wait()
        return asked.message

    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        get = (await found_in(one))["Get"].native
        server.answer = late
        theirs = await failure_of(one, get, attempts=1)
        server.answer = silent
        ours = await failure_of(one, get, attempts=1, left_s=0.3)
        release.set()
    assert (theirs.code, theirs.message) == ("E3503", "`shop` answered DEADLINE_EXCEEDED: the warehouse did not answer")
    assert theirs.details == {"status": "DEADLINE_EXCEEDED", "sent": True, "body": "the warehouse did not answer"}
    assert (ours.code, ours.details) == ("E3503", {"sent": True})


async def test_enums_by_number_and_numbers_that_json_lacks_are_accepted(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        echo = (await found_in(one))["Echo"]
        takes = Schema(echo.input_schema)
        names: Json = echo.input_schema["properties"]
        floats = [name for name, part in names.items() if {"type": "number"} in part.get("anyOf", ())]
        enums = [name for name, part in names.items() if {"type": "integer"} in part.get("anyOf", ())]
        assert floats
        assert enums
        for number in ("NaN", "Infinity", "-Infinity"):
            sent = {floats[0]: number, enums[0]: 1}
            assert takes.valid(sent)
            answer = await one.call(remote_call(echo.native, sent))
            assert answer[floats[0]] == number


async def test_numbers_that_json_lacks_go_through_every_endpoint_and_back(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, opened(tmp_path / "home") as wires:
        config = {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True, "allow_private": True}
        overlay = {"defaults": {"mutation_class": "read_only"}}
        report = await wires.app.upstreams.add("shop", "grpc", config, by=wires.app.caller, overlay=overlay)
        echo = next(one.address for one in report.tools if one.name == "shop.v1.Shop.Echo")
        bearer = wires.metadata()
        for number, word in ((math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")):
            sent = {"small": word, "large": word}
            for door in WIRES:
                heard = await wires.call(door, echo, sent)
                assert heard.data == heard.data | sent, door
            # A Struct holds such numbers themselves.
            asked = wire.InvokeRequest(tool_id=echo)
            asked.arguments.update({"small": number, "large": number})
            told = await wires.stub.Invoke(asked, metadata=bearer)
            assert orjson.loads(told.value_json) == orjson.loads(told.value_json) | sent
            arrived = {str(value) for one in server.asked[-6:] for value in (one.message.small, one.message.large)}
            assert arrived == {str(number)}


async def test_a_server_says_in_its_status_when_to_come_back(tmp_path: Path) -> None:
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    status = Status(code=8)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=100)))

    async def refuse(_: Asked, context: Any) -> Any:
        trailers = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "slowly", trailers)

    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        get = (await found_in(one))["Get"].native
        server.answer = refuse
        failure = await failure_of(one, get)
    assert (failure.code, failure.retry_after_ms) == ("E3504", 100_000)
    assert len(server.asked) == 1


@pytest.mark.proves("OPS-15")
async def test_a_server_that_refuses_is_left_alone_and_the_next_one_is_asked(
    tmp_path: Path, closed_port: Callable[[], int]
) -> None:
    async with services_of(tmp_path / "home") as services, ShopServer.open(tmp_path) as server:
        away = closed_port()
        async with upstream(server.port) as looking:
            get = (await found_in(looking))["Get"].native
        async with upstream(away, server.port, services=services) as one:
            for _ in range(8):
                await one.call(remote_call(get))
        assert {state.service: state.state for state in services.snapshot()}[f"shop grpc://127.0.0.1:{away}"] == "open"
    assert len(server.asked) == 8


async def test_a_refusing_server_was_not_asked_and_the_next_one_is(
    tmp_path: Path, closed_port: Callable[[], int]
) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as looking:
        put = (await found_in(looking))["Put"].native
        async with upstream(closed_port()) as one:
            failure = await failure_of(one, put, writes=True, key="k1")
            with pytest.raises(Failure) as caught:
                await one.probe()
        assert (failure.code, (failure.details or {})["sent"]) == ("E3502", False)
        assert caught.value.code == "E3502"
        async with upstream(closed_port(), server.port) as one:
            await one.call(remote_call(put, writes=True, key="k1"))
    assert len(server.asked) == 1


@pytest.mark.shows("gRPC", "deadline")
@pytest.mark.supports("EXEC-09")
async def test_a_slow_server_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        get = (await found_in(one))["Get"].native
        gone = asyncio.Event()

        async def hang(_: Asked, __: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                gone.set()

        server.answer = hang
        assert (await failure_of(one, get, left_s=1.0)).code == "E3503"
        async with asyncio.timeout(60):
            await gone.wait()  # the server was told that nobody waits any more


async def test_closing_ends_the_calls_that_are_under_way(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, upstream(server.port) as one:
        put = (await found_in(one))["Put"].native
        arrived = asyncio.Event()

        async def hang(_: Asked, __: Any) -> Any:
            arrived.set()
            await asyncio.Event().wait()

        server.answer = hang
        waiting = asyncio.create_task(failure_of(one, put, writes=True))
        await arrived.wait()
        await one.close()
        assert ((await waiting).code, len(server.asked)) == ("E3502", 1)


@pytest.mark.shows("gRPC", "retries of reads", "no resent writes")
@pytest.mark.proves("EXEC-09")
@pytest.mark.supports("CONTRACT-14")
async def test_a_write_that_broke_off_is_not_sent_again_and_a_read_is(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, Tap.open(server.port) as tap, upstream(tap.port) as one:
        tools = await found_in(one)
        answer = server.answer

        async def cut_once(asked: Asked, context: Any) -> Any:
            server.answer = answer
            tap.cut()
            return await answer(asked, context)

        server.answer = cut_once
        failure = await failure_of(one, tools["Put"].native, writes=True, key="k1")
        assert (failure.code, (failure.details or {})["sent"]) == ("E3502", True)
        assert len(server.asked) == 1
        server.answer = cut_once
        assert (await one.call(remote_call(tools["Get"].native)))["id"] == "7"
        assert len(server.asked) == 3


@pytest.mark.proves("EXEC-09")
async def test_all_calls_share_one_connection(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server, Tap.open(server.port) as tap, upstream(tap.port) as one:
        get = (await found_in(one))["Get"].native
        for _ in range(10):
            await asyncio.gather(*(one.call(remote_call(get)) for _ in range(50)))
        assert len(server.asked) == 500
        assert tap.connections == 1


async def test_tls_checks_the_name_although_the_address_was_judged(tmp_path: Path) -> None:
    async def here(host: str) -> Sequence[str]:
        assert host in ("service.example", "other.example")
        return ["127.0.0.1"]

    certificate = new_certificate(tmp_path)
    tls = {"ca_file": str(certificate.cert_file)}
    async with ShopServer.open(tmp_path, certificate=certificate) as server:
        said: Json = {"plaintext": False, "tls": tls, "resolve": here}
        async with upstream(targets=[f"service.example:{server.port}"], **said) as one:
            await one.call(remote_call((await found_in(one))["Get"].native))
        async with upstream(targets=[f"other.example:{server.port}"], **said) as one:
            with pytest.raises(Failure) as caught:
                await one.probe()
    assert caught.value.code == "E3502"
    assert len(server.asked) == 1


@pytest.mark.proves("EXEC-09")
async def test_addresses_that_may_not_be_reached_are_not(tmp_path: Path, closed_port: Callable[[], int]) -> None:
    async def rebinding(_: str) -> Sequence[str]:
        return ["93.184.216.34", "127.0.0.1"]

    async with upstream(closed_port(), allow_private=False) as one:
        with pytest.raises(Failure) as literal:
            await one.probe()
    async with upstream(targets=["rebind.example:443"], allow_private=False, resolve=rebinding) as one:
        with pytest.raises(Failure) as name:
            await one.discover()
    async with upstream(targets=["169.254.169.254:80"]) as one:
        with pytest.raises(Failure) as metadata:
            await one.probe()
    assert [caught.value.code for caught in (literal, name, metadata)] == ["E3406"] * 3


def test_a_description_that_is_not_whole_spoils_no_other() -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    def file(name: str, **messages: str) -> FileDescriptorProto:
        one = FileDescriptorProto(name=f"{name}.proto", package=name, syntax="proto3")
        for message, refers in messages.items():
            field = one.message_type.add(name=message).field.add(name="x", number=1, label=1, type=11)
            field.type_name = refers
        one.service.add(name="S").method.add(name="Do", input_type=f".{name}.In", output_type=f".{name}.In")
        return one

    given = FileDescriptorSet(file=[file("good", In=".good.In"), file("bad", In=".nowhere.Thing")])
    files = {one.name: one for one in given.file}
    ((name, found),) = definitions("good.S", files)
    assert name == "good.S.Do"
    assert isinstance(found, Definition)
    assert found.input_schema["properties"] == {"x": {"$ref": "#/$defs/good.In"}}
    ((name, found),) = definitions("bad.S", files)
    assert (name, found) == ("bad.S", "its description is not whole")


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_that_breaks_off_is_asked_in_the_other_version_and_once_more(
    tmp_path: Path, version: str
) -> None:
    untyped: Any = grpc
    service = f"grpc.reflection.{version}.ServerReflection"
    asked = 0

    async def breaks_off(requests: Any, context: Any) -> Any:
        nonlocal asked
        asked += 1
        await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")

    method = untyped.stream_stream_rpc_method_handler(breaks_off)
    handler = untyped.method_handlers_generic_handler(service, {"ServerReflectionInfo": method})
    whole = version == "v1"
    async with (
        ShopServer.open(tmp_path, reflection=whole, handlers=(handler,)) as server,
        upstream(server.port) as one,
    ):
        if whole:
            assert (await one.discover()).tools, "v1alpha is there"
            assert asked == 1
            return
        with pytest.raises(Failure) as caught:
            await one.discover()
        assert "INTERNAL" in caught.value.message
        assert asked == 2


async def test_a_server_without_reflection_says_so(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path, reflection=False) as server, upstream(server.port) as one:
        with pytest.raises(Failure) as caught:
            await one.discover()
    assert caught.value.code == "E3109"
    assert "reflection" in caught.value.message


@pytest.mark.shows("gRPC", "credentials")
@pytest.mark.proves("EXEC-09")
async def test_behind_interlock_breaker_limit_credential_and_trace_apply(tmp_path: Path) -> None:
    async with ShopServer.open(tmp_path) as server:

        async def refuse(_: Asked, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")

        def fail() -> None:
            server.answer = refuse

        trace = await governed(
            tmp_path / "home",
            "grpc",
            {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True},
            tool="shop.v1.Shop.Get",
            asked=lambda: len(server.asked),
            fail=fail,
        )
    assert server.asked[0].metadata["traceparent"].split("-")[1] == trace
    assert {asked.metadata["authorization"] for asked in server.asked} == {"Bearer s3cret"}


@pytest.mark.parametrize(
    "said",
    [
        {"targets": []},
        {"targets": ["host"]},
        {"targets": ["http://host:1"]},
        {"targets": ["h:1"], "auth": {"kind": "query", "secret": "T", "name": "x"}},
        {"targets": ["h:1"], "plaintext": True, "auth": {"kind": "bearer", "secret": "T"}},
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(said: Json) -> None:
    with pytest.raises(pydantic.ValidationError):
        GrpcConfig.model_validate(said)
