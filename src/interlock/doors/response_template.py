"""The answer to a plain call, put into words once per tool.

What a door says of a call that simply succeeded differs from the next only in a few places: its ids, its time and its
value. So a door words the answer to a sample, and everything else about it is kept as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import orjson

from interlock.call.results import INLINE, Result
from interlock.core.clock import iso
from interlock.data.canonical import encode
from interlock.data.schema import Json

# Stands for the id of a request, in what a door words from a sample.
REQUEST = "⟦request⟧"
_CALL, _TRACE, _RULES, _VALUE = "⟦call⟧", "⟦trace⟧", ("⟦rule⟧",), ["⟦value⟧"]
_APPROVAL = ["⟦approval⟧"]
_AT_MS, _TOOK = 253_402_300_799_987, 71_234.567_891
_FILLINGS = ("call", "trace", "at", "took", "rules", "request", "value", "text", "approval")
_MOST = 1000


class Template:
    """The answers to plain calls of one tool, as `put` words them: of those with an approval, or of those without."""

    __slots__ = ("filled", "has_approval", "has_rules", "has_text")

    def __init__(self, put: Callable[[Result], Json], tool: str, *, approved: bool) -> None:
        metadata: Json = {"latency_ms": _TOOK, "policy_refs": _RULES}
        if approved:
            metadata["approval"] = _APPROVAL
        words = encode(put(Result(_CALL, tool, "succeeded", _AT_MS, _TRACE, metadata, _VALUE)))
        value = encode(_VALUE)
        marks = (
            _CALL.encode(), _TRACE.encode(), iso(_AT_MS).encode(), encode(_TOOK), encode(_RULES), encode(REQUEST),
            value, encode(value.decode()),  # the second is the text that models read
            encode(_APPROVAL),
        )  # fmt: skip
        places = [re.escape(one) for one in marks]
        places[3] = rb"(?<=[:,\[])" + places[3]  # a number stands by itself, where the digits of a version do not
        found = re.compile(b"|".join(b"(%b)" % one for one in places))
        order = [one.lastindex - 1 for one in found.finditer(words) if one.lastindex is not None]
        self.has_rules, self.has_text, self.has_approval = 4 in order, 7 in order, 8 in order
        constants = {f"word_{at}": one.decode() for at, one in enumerate(re.split(b"|".join(places), words))}
        turns = zip_longest(constants, [_FILLINGS[place] for place in order])
        in_turn = "".join(f"{{{name}}}" for turn in turns for name in turn if name is not None)
        # A format string puts them together quickest. It is written here, of our own names, each in braces.
        self.filled: Callable[..., str] = eval(f"lambda {', '.join(_FILLINGS)}: f'{in_turn}'", constants)  # noqa: S307


class Templates:
    """Templates for each tool, with an approval and without, made when they are first needed."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, bool], Template] = {}

    def answer(self, result: Result, put: Callable[[Result], Json], request: Any = None) -> bytes | None:
        """The answer to a call that simply succeeded, to a request of this id; None for any other result.

        Such a result consists only of its value, its source, its duration and how it was approved. `put` words the
        answer to a sample of it.
        """
        metadata = result.metadata
        approved = "approval" in metadata
        if (
            result.error is not None or result.source != "compute" or result.persistence is not INLINE
            or result.state != "succeeded" or result.redacted or result.artifacts
            or len(metadata) != (3 if approved else 2) or "latency_ms" not in metadata or "policy_refs" not in metadata
        ):  # fmt: skip
            return None
        template = self._templates.get((result.tool, approved))
        if template is None:
            if len(self._templates) >= _MOST:
                self._templates.clear()
            template = self._templates[result.tool, approved] = Template(put, result.tool, approved=approved)
        try:
            value, request_id = orjson.dumps(result.value).decode(), orjson.dumps(request).decode()
        except TypeError:  # a number of more than 64 bits
            value, request_id = encode(result.value).decode(), encode(request).decode()
        return template.filled(
            result.invocation_id,
            result.trace_id,
            iso(result.created_ms),
            orjson.dumps(metadata["latency_ms"]).decode(),
            orjson.dumps(metadata["policy_refs"]).decode() if template.has_rules else "",
            request_id,
            value,
            value if not template.has_text or isinstance(result.value, str) else orjson.dumps(value).decode(),
            orjson.dumps(metadata["approval"]).decode() if template.has_approval else "",
        ).encode()
