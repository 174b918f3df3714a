"""The answer to a plain call, put into words once per tool.

What a door says of a call that simply succeeded differs from the next only in a few places: its ids, its time and its
value. So a door words the answer to a sample, and everything else about it is kept as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import orjson

from interlock.core.canonical import encode
from interlock.core.clock import iso
from interlock.core.results import Result
from interlock.core.schema import Json

# Stands for the id of a request, in what a door words from a sample.
REQUEST = "⟦request⟧"
_CALL, _TRACE, _RULES, _VALUE = "⟦call⟧", "⟦trace⟧", ("⟦rule⟧",), ["⟦value⟧"]
_AT_MS, _TOOK = 253_402_300_799_987, 71_234.567_891
_KEPT = 1000


class Template:
    """The answers to plain calls of one tool, as `put` words them."""

    def __init__(self, put: Callable[[Result], Json], tool: str) -> None:
        metadata = {"latency_ms": _TOOK, "policy_refs": _RULES}
        words = encode(put(Result(_CALL, tool, "succeeded", _AT_MS, _TRACE, metadata, _VALUE)))
        value = encode(_VALUE)
        marks = (
            _CALL.encode(), _TRACE.encode(), iso(_AT_MS).encode(), encode(_TOOK), encode(_RULES), encode(REQUEST),
            value, encode(value.decode()),  # the second is the text that models read
        )  # fmt: skip
        places = [re.escape(one) for one in marks]
        places[3] = rb"(?<=[:,\[])" + places[3]  # a number stands by itself, where the digits of a version do not
        found = re.compile(b"|".join(b"(%b)" % one for one in places))
        order = [one.lastindex - 1 for one in found.finditer(words) if one.lastindex is not None]
        self._words = found.sub(b"%b", words.replace(b"%", b"%%"))
        self._filled = itemgetter(*order)
        self._has_rules, self._has_text = 4 in order, 7 in order

    def fill(self, result: Result, request: Any = None) -> bytes:
        """The answer to a plain call, to a request of this id."""
        metadata, value = result.metadata, encode(result.value)
        return self._words % self._filled((
            result.invocation_id.encode(),
            result.trace_id.encode(),
            iso(result.created_ms).encode(),
            orjson.dumps(metadata["latency_ms"]),
            orjson.dumps(metadata["policy_refs"]) if self._has_rules else b"",
            encode(request),
            value,
            value if not self._has_text or isinstance(result.value, str) else orjson.dumps(value.decode()),
        ))  # fmt: skip


class Templates:
    """A template for each tool, made when it is first called."""

    def __init__(self) -> None:
        self._made: dict[str, Template] = {}

    def of(self, tool: str, put: Callable[[Result], Json]) -> Template:
        found = self._made.get(tool)
        if found is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            found = self._made[tool] = Template(put, tool)
        return found
