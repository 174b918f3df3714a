"""Spans reach an OpenTelemetry collector over HTTP, the last of them when the home is closed."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from interlock import Interlock
from interlock.settings import load_settings
from tests.support.hostile import flood, raw_server, read_head
from tests.support.traced import attach


class Collector(ThreadingHTTPServer):
    """Takes what is sent to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, bytes]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        self.server.got.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name is the base class's


@contextmanager
def collector() -> Generator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


async def test_spans_are_sent_to_the_collector_and_nothing_is_left_behind_at_the_end(home: Path) -> None:
    with collector() as server:
        async with Interlock.open(home, otlp_endpoint=server.address) as app:
            attach(app)
            result = await app.call("demo.add", a=1)
            failed = await app.call("seen.crash", how="raise")
    assert {path for path, _ in server.got} == {"/v1/traces"}
    batches = [ExportTraceServiceRequest.FromString(body) for _, body in server.got]
    sent = [
        (span, {one.key: one.value.string_value for one in resource.resource.attributes})
        for batch in batches
        for resource in batch.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {about["service.name"] for _, about in sent} == {"interlock"}
    traces = {span.trace_id.hex(): span for span, _ in sent if span.name == "tool.invoke"}
    assert traces.keys() == {result.trace_id, failed.trace_id}
    assert traces[failed.trace_id].status.message == "EXECUTION_FAILED"
    assert len(sent) == 6 + 5


async def test_a_ratio_of_nought_sends_nothing(home: Path) -> None:
    with collector() as server:
        async with Interlock.open(home, otlp_endpoint=server.address, trace_ratio=0.0) as app:
            attach(app)
            assert (await app.call("demo.add", a=1)).ok
    assert server.got == []


def test_tracing_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    settings = load_settings(tmp_path / "settings.toml")
    assert (settings.trace_ratio, settings.otlp_endpoint) == (None, "")


def test_the_sdk_is_not_loaded_where_nothing_is_exported() -> None:
    heavy = {"opentelemetry", "prometheus_client", "requests"}
    code = f"import sys, interlock.api.interlock; print([m for m in sys.modules if m.partition('.')[0] in {heavy}])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_a_collector_whose_answer_has_no_end_is_cut_off(home: Path) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        flood(connection, b"1000\r\n" + b" " * 4096 + b"\r\n")

    with raw_server(serve) as server:
        async with Interlock.open(home, otlp_endpoint=f"http://127.0.0.1:{server.port}") as app:
            attach(app)
            assert (await app.call("demo.add", a=1)).ok
        assert server.accepted >= 1
        assert await server.all_closed()
