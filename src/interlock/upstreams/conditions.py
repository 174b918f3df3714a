"""Writes of HTTP services that are for one version of what they change: the ETag that was read.

    tools:
      get_document: {mutation_class: read_only}
      put_document:
        if_match: {argument: seen, read_by: get_document}

The read's result has the ETag as the version of its data (`dataVersion`, see `call.conditional`). The write takes it as
an argument and sends it as `If-Match`, so the service itself compares, at the moment of the write. What it refuses has
not been done: E3410 if there is another version by now, or nothing, E3411 if something that must be there is not, or is
there although it must not be.

A write that states a version is sent once, unless the service was not reached. Sent again after a lost answer, it would
find the version that it has made itself, and the refusal of it would say that nothing was done. For the same reason the
outcome of its call is unknown then, also if the tool is safe to run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from interlock.call.conditional import ABSENT, NATIVE, PROTOCOLS, tag_of, version_in
from interlock.call.connector import Definition, RemoteCall
from interlock.contract.manifest import ManifestPart
from interlock.core.errors import Failure
from interlock.data.schema import Json

_UNMET = (412, 428)


class IfMatch(ManifestPart):
    """The argument of a write that holds the version it is for, and the tool whose results have that version."""

    argument: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][\w.-]*$")
    read_by: str = Field(min_length=1, max_length=500)
    required: bool = False

    def native(
        self,
        definition: Definition,
        others: Mapping[str, Definition],
        mutation_class: str,
        class_of: Callable[[Definition], str],
    ) -> Json:
        """Return the part of a write's operation that says where its version comes from; E3105 if that cannot be."""
        if definition.native.get("protocol") not in PROTOCOLS:
            raise Failure("E3105", "if_match: only HTTP services know the header If-Match")
        if mutation_class == "read_only":
            raise Failure("E3105", "if_match: a read_only tool changes no version")
        reader = others.get(self.read_by)
        if reader is None:
            raise Failure("E3105", f"if_match: `{self.read_by}` is not a tool of this upstream")
        if class_of(reader) != "read_only":
            words = f"say mutation_class: read_only of `{self.read_by}`, if that holds"
            raise Failure("E3105", f"if_match: the version is read with a tool that only reads; {words}")
        return {NATIVE: {"argument": self.argument}}

    def add_argument(self, definition: Definition, schema: Json, known: Json) -> None:
        """Add the argument for the version to a write's input schema and its properties.

        Where the operation has the header among its parameters, that argument is used. E3105 if it has another of
        the name.
        """
        own = [one for one in definition.native.get("parameters", ()) if one.get("argument") == self.argument]
        is_header = any(one.get("in") == "header" and str(one.get("name")).lower() == "if-match" for one in own)
        if self.argument in known and not is_header:
            raise Failure("E3105", f"if_match: the tool takes another `{self.argument}`; choose another name")
        known[self.argument] = {
            "type": "string",
            "maxLength": 260,
            "description": f"The version that was read: `dataVersion` of a result of {self.read_by}. If there is"
            " another by now, nothing is changed. `*` stands for any version, and an empty text for none: it must not"
            " exist yet.",
            "examples": ["*"],
        }
        if self.required:
            schema["required"] = [*dict.fromkeys((*schema.get("required", ()), self.argument))]


def arguments_of(call: RemoteCall) -> Json:
    """Return the arguments of a call without the version that it is for."""
    stated = call.native.get(NATIVE)
    if stated is None:
        return call.arguments
    return {name: value for name, value in call.arguments.items() if name != stated["argument"]}


def header_of(call: RemoteCall) -> dict[str, str]:
    """Return the header that states the version which a call is for."""
    stated = call.native.get(NATIVE)
    version: Any = None if stated is None else call.arguments.get(stated["argument"])
    if version is None:
        return {}
    if version == "":
        return {"if-none-match": "*"}
    if version == "*":
        return {"if-match": "*"}
    tag = tag_of(str(version))
    if tag is None:
        raise Failure("E3308", f"`{call.native[NATIVE]['argument']}` is no version that a read could have returned")
    return {"if-match": tag}


def refusal(status: int, sent: Mapping[str, str], name: str, details: Json) -> Failure | None:
    """Convert the answer of a service `name` that a condition of the request does not hold. None for other answers.

    `sent` are the headers of the request. A service that finds nothing says so before it looks at conditions (RFC 9110,
    13.2.1), and then there is no version either. INVARIANT: what was refused in this way has not been done.
    """
    stated = version_in(sent)
    gone = status in ABSENT and stated is not None
    if status not in _UNMET and not gone:
        return None
    details, ref = {**details, "preconditionFailed": True}, f"http:{status}"
    said = f": {details['body']}" if details.get("body") else ""
    if status != 428 and stated not in (None, "*"):
        words = f"what the call would change at `{name}` has changed since it was read"
        if gone:
            words = f"what the call would change is there no longer: `{name}` answered {status}{said}"
        return Failure("E3410", words, details=details, native_error_ref=ref)
    words = f"`{name}` answered {status}, because a condition of the request does not hold{said}"
    if status == 428:
        words = f"`{name}` makes this change only for a stated version{said}"
    return Failure("E3411", words, details=details, native_error_ref=ref)
