"""Paging: a cursor that contains the whole query, so that the next page needs nothing else.

A paged tool takes an optional `cursor` and returns `items`, the next `cursor` and perhaps `totalCount`. Callers get an
encrypted cursor: it contains the arguments of the query and the tool's own cursor, for this caller and this version
only. Nothing is stored for it, and the query cannot be read from it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.gateway.inputs import difference
from interlock.store.signing import own_secret

if TYPE_CHECKING:
    from interlock.call.phases import Requested, Verified
    from interlock.data.schema import Json

CURSOR_LIVES_S = 86_400


class Cursors:
    """Makes and opens cursors with a key of the data directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "cursor.key"

    @cached_property
    def _box(self) -> Any:
        import base64

        from cryptography.fernet import Fernet

        return Fernet(base64.urlsafe_b64encode(own_secret(self._path)))

    def prepare(self) -> None:
        """Make the key now, unless it is there."""
        _ = self._box

    def restore(self, requested: Requested, given: Json) -> Json:
        """Return the query of a cursor. Any other input is returned as it is."""
        token = given.get("cursor")
        if given.keys() != {"cursor"} or not isinstance(token, str):
            return given
        from cryptography.fernet import InvalidToken

        try:
            query: Json = orjson.loads(self._box.decrypt(token.encode(), ttl=CURSOR_LIVES_S))
        except (InvalidToken, ValueError):
            raise _unusable() from None
        if query["for"] != self._for(requested):
            raise _unusable()
        arguments: Json = {**query["arguments"], "cursor": query["cursor"]}
        requested.extend().mutations.extend(difference("cursor", given, arguments))
        return arguments

    def split(self, verified: Verified) -> Verified:
        """Make the items of the page the value of the result, and put its position into the metadata."""
        checked = verified
        page = cast("Json", verified.value)
        query = {name: value for name, value in checked.input.items() if name != "cursor"}
        inner = page.get("cursor")
        token = None if inner is None else self._seal(checked, query, inner)
        checked.extend().pagination = {
            "cursor": token,
            "hasMore": inner is not None,
            "totalCount": page.get("totalCount"),
        }
        items = page["items"]
        verified.value, verified.encoded = items, encode(items)
        return verified

    def _seal(self, requested: Requested, query: Json, inner: Any) -> str:
        body = orjson.dumps({"for": self._for(requested), "arguments": query, "cursor": inner})
        token: bytes = self._box.encrypt(body)
        return token.decode()

    def _for(self, requested: Requested) -> list[str]:
        caller = requested.request.caller
        assert caller is not None
        return [caller.tenant, caller.id, requested.tool.ref]


def _unusable() -> Failure:
    return Failure("E3308", "cursor: not a cursor of this tool and caller, or too old; start again from the first page")
