"""Attachments of a result: items of content, views, handoffs, and facts about its data.

A tool adds them through its context. In a sandbox they travel with its reports and are checked again on the host, by
the same functions. The gateway redacts them, bounds them and puts them into the result.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, cast

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import encode

if TYPE_CHECKING:
    from interlock.data.schema import Json

MOST_ITEMS, MOST_BYTES = 100, 1 << 20
MOST_HANDOFFS, MOST_HANDED_OVER = 100, 4096
LONGEST_VIEW = 20_000
LONGEST_HANDOFF_S = 30 * 86_400
# References to stored data are made by Interlock alone.
_NOT_FROM_TOOLS = frozenset({"persisted_ref", "artifact_ref"})
_BINARY = ("data", "blob")
_NOT_FOR_MODELS = frozenset({"log"})
VIEWS = ("model", "summary", "search")
LONGEST_VERSION = 256


class Link(Protocol):
    """One link of the chain of a token."""

    @property
    def expires(self) -> int: ...


class Rights(Protocol):
    """The authority of a token of a caller."""

    @property
    def links(self) -> Sequence[Link]: ...

    def covers_resource(self, resource: str, /) -> bool: ...


class Authority(Protocol):
    """The authority of a call: that of its caller."""

    @property
    def scopes(self) -> Collection[str]: ...

    @property
    def capability(self) -> Rights | None: ...

    @property
    def acting(self) -> str: ...


@dataclass(slots=True)
class Attached:
    """Everything that one call attaches to its value."""

    content: list[Json] = field(default_factory=list[dict[str, Any]])
    views: dict[str, str] = field(default_factory=dict[str, str])
    handoffs: list[Json] = field(default_factory=list[dict[str, Any]])
    provenance: Json = field(default_factory=dict[str, Any])

    def __bool__(self) -> bool:
        return bool(self.content or self.views or self.handoffs or self.provenance)

    def add_content(self, fields: Mapping[str, Any]) -> None:
        """Add an item of content; E3401 if it is invalid."""
        if len(self.content) >= MOST_ITEMS:
            raise _wrong(f"a result holds at most {MOST_ITEMS} items of content")
        item = {name: _as_text(value) for name, value in fields.items() if value is not None}
        self.content.append(_item(item))
        if sum(len(encode(one)) for one in self.content) > MOST_BYTES:
            raise _wrong(f"the content of a result is larger than {MOST_BYTES} bytes; leave it as a file")

    def add_views(self, views: Mapping[str, Any]) -> None:
        """State how the result is shown; E3401 for an unknown view."""
        for name, text in views.items():
            if text is None:
                continue
            if name not in VIEWS or not isinstance(text, str) or len(text) > LONGEST_VIEW:
                raise _wrong(f"a view is a text of up to {LONGEST_VIEW} characters for {', '.join(VIEWS)}")
            self.views[name] = text

    def add_handoff(self, handoff: Mapping[str, Any], caller: Authority) -> None:
        """Add a reference that hands work over; E3206 if it names more authority than the call has."""
        if len(self.handoffs) >= MOST_HANDOFFS:
            raise _wrong(f"a result holds at most {MOST_HANDOFFS} handoffs")
        self.handoffs.append(_handoff(handoff, caller))

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """State the version of the data (`data_version`) and the confidence in the value (`confidence`); E3401 if
        neither.
        """
        version, confidence = facts.get("data_version"), facts.get("confidence")
        if facts.keys() - {"data_version", "confidence"}:
            raise _wrong("provenance is a data_version and a confidence")
        if version is not None:
            if not isinstance(version, str) or not 0 < len(version) <= LONGEST_VERSION or not version.isprintable():
                raise _wrong(f"data_version is a text of 1 to {LONGEST_VERSION} printable characters")
            self.provenance["data_version"] = version
        if confidence is not None:
            if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
                raise _wrong("confidence is a number from 0 to 1")
            self.provenance["confidence"] = float(confidence)


def _wrong(words: str) -> Failure:
    return Failure("E3401", f"the tool attached an invalid value: {words}", retryable=False)


def _as_text(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _item(item: Json) -> Json:
    """Check an item of content with the standard's own model."""
    from interlock.contract.standard.results import content_item

    if item.get("type") in _NOT_FROM_TOOLS:
        raise _wrong(f"`{item['type']}` refers to something that Interlock keeps, and only Interlock makes it")
    checked = content_item(item)
    if checked is None:
        raise _wrong("it is not an item of content")
    binary(checked)
    return checked


def binary(item: Json) -> bytes:
    """Decode the base64 data of an item; E3401 if it is not base64."""
    try:
        return b"".join(base64.b64decode(item[name], validate=True) for name in _BINARY if item.get(name))
    except (binascii.Error, ValueError):
        raise _wrong("its data is not base64") from None


def _handoff(handoff: Mapping[str, Any], caller: Authority) -> Json:
    """Check a handoff: the work, the agent or tool, the authority and the period."""
    what, to, lasts_s = handoff.get("what"), handoff.get("to"), handoff.get("expires_s")
    scopes, resources = _texts(handoff.get("scopes")), _texts(handoff.get("resources"))
    if not isinstance(what, Mapping) or not what or len(encode(dict(cast("Json", what)))) > MOST_HANDED_OVER:
        raise _wrong(f"a handoff says what is handed over, as an object of up to {MOST_HANDED_OVER} bytes")
    named = cast("Json", to) if isinstance(to, Mapping) else {}
    if len(named) != 1 or not named.keys() <= {"agent", "tool"} or not all(_is_name(one) for one in named.values()):
        raise _wrong("a handoff is for one agent or for one tool")
    if isinstance(lasts_s, bool) or not isinstance(lasts_s, int | float) or not 0 < lasts_s <= LONGEST_HANDOFF_S:
        raise _wrong(f"a handoff lasts up to {LONGEST_HANDOFF_S} seconds")
    # INVARIANT: a handoff names no authority that the call which makes it does not have.
    lacking = [one for one in scopes if one not in caller.scopes]
    token = caller.capability
    lacking += [one for one in resources if token is not None and not token.covers_resource(one)]
    if lacking:
        raise Failure("E3206", f"a handoff names authority that the call does not have: {', '.join(lacking[:5])}")
    return {
        "what": dict(cast("Json", what)),
        "to": dict(named),
        "authority": {"scopes": scopes, "resources": resources},
        "expires_s": lasts_s,
    }


def _texts(value: Any) -> list[str]:
    texts = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else None if value else []
    if texts is None or len(texts) > MOST_ITEMS or not all(_is_name(one) for one in texts):
        raise _wrong("the authority of a handoff is a list of scopes and a list of resources")
    return texts


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 512 and value.isprintable()


def handoffs(attached: Attached, invocation_id: str, caller: Authority, now_ms: int) -> list[Json]:
    """The handoffs of a call for its result. None of them outlasts the caller's own token."""
    links = () if caller.capability is None else caller.capability.links
    ends = [link.expires * 1000 for link in links]
    return [
        {
            "handoff_id": f"hnd_{invocation_id}_{number}",
            "what": one["what"],
            "to": one["to"],
            "authority": one["authority"],
            "from": caller.acting,
            "expires_at": iso(min(now_ms + round(one["expires_s"] * 1000), *ends, 2**53)),
        }
        for number, one in enumerate(attached.handoffs, 1)
    ]


def for_models(items: Sequence[Json]) -> list[Json]:
    """Return the items that a model reads. Logs are for people."""
    return [one for one in items if one["type"] not in _NOT_FOR_MODELS]


def words_of(items: Sequence[Json]) -> str:
    """Return the texts of items, for people and for searching."""
    texts = (one.get("text") or one.get("diff") or one.get("name") or one.get("uri") or "" for one in items)
    return "\n".join(text for text in texts if text)


Clean = Callable[[Any], Any]


def cleaned(items: Sequence[Json], clean: Clean) -> list[Json]:
    """Clean all texts of items; base64 data is left unchanged."""
    return [
        {name: value if name in (*_BINARY, "type") else clean(value) for name, value in item.items()} for item in items
    ]
