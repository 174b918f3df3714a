"""Messages of JSON-RPC: requests as they are read, and the errors of the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.doors.ids import RULE, usable
from interlock.doors.response_template import REQUEST

if TYPE_CHECKING:
    from interlock.data.schema import Json


LONGEST_TEXT = 4000
PARSE, INVALID, NO_METHOD, PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
ABSENT = object()


class Fault(Exception):  # noqa: N818 - a fault of the protocol, which is answered
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def success(result: Result) -> Json:
    return {"jsonrpc": "2.0", "id": REQUEST, "result": result.document()}


def expected_schemas(sent: Any) -> Json | None:
    if sent is None or isinstance(sent, dict):
        return cast("Json | None", sent)
    raise Fault(PARAMS, "invalid params: `expected` is an object, a schema for each tool")


def request_in(sent: Any) -> Json:
    if not isinstance(sent, dict):
        raise Fault(INVALID, "invalid request: a request is an object")
    request = cast("Json", sent)
    if request.get("jsonrpc") != "2.0":
        raise Fault(INVALID, 'invalid request: `jsonrpc` must be "2.0"')
    return request


def id_in(request: Json) -> Any:
    found: Any = request.get("id", ABSENT)
    # A number with a fraction is short, whatever it is.
    if found is ABSENT or found is None or found.__class__ is float or usable(found):
        return found
    raise Fault(INVALID, f"invalid request: `id` is null or {RULE}")


def whole(value: Any, name: str, most: int) -> int:
    if type(value) is int and 1 <= value <= most:
        return value
    raise Fault(PARAMS, f"invalid params: `{name}` is a whole number from 1 to {most}")


def text_in(value: Any, name: str) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= LONGEST_TEXT):
        return value
    raise Fault(PARAMS, f"invalid params: `{name}` is a string of at most {LONGEST_TEXT} characters")


def failed(request_id: Any, failure: Failure, trace_id: str, code: int | None = None) -> Json:
    data = failure.envelope(trace_id)
    error = {"code": failure.row.jsonrpc if code is None else code, "message": failure.message, "data": data}
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def error_message(request_id: Any, code: int, message: str, trace_id: str) -> Json:
    data = Failure("E3004", message).envelope(trace_id)
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": data}}
