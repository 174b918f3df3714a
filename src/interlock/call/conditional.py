"""Calls of HTTP services that are for one version of what they change, and the entity tags that are these versions.

A read tells the tag of its answer (RFC 9110, 8.8.3) as the version of its data. A write that states this version sends
the tag back as it was:

    ETag of the answer          version       sent with the write
    "v7"                        v7            If-Match: "v7"
    W/"v7"                      W/"v7"        If-Match: W/"v7"
    "*", "" and "W/"            in quotes     as it was
    v7, which lacks its quotes  v7            If-Match: "v7"
    anything else               none

Two versions are the caller's own: `*` (If-Match: *) is any version, and an empty text (If-None-Match: *) none at all.

INVARIANT: no tag becomes one of these two, so a write for a version that was read overwrites no other version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from interlock.core.expressions import expression
from interlock.data.schema import Json

NATIVE = "if_match"
# Marks the operations of reads whose versions writes take.
READ_BY = "versioned"
PROTOCOLS = ("http", "openapi")
HEADERS = ("if-match", "if-none-match", "if-unmodified-since")
# The characters of an entity tag, as far as they are ASCII. Others might not come back as the bytes that they were.
_OPAQUE = r"[\x21\x23-\x7e]"
_TAG = expression(rf'(?:W/)?"{_OPAQUE}{{0,250}}"')
_BARE = expression(rf"{_OPAQUE}{{1,250}}")
_NAMED = expression(r"\{([A-Za-z_][\w.-]*)\}")

# What a call demands to be there: one version, any version, or nothing.
Demand = Literal["version", "any", "none"]
# The statuses that say that nothing is there.
ABSENT = (404, 410)


def version_of(tag: str) -> str | None:
    """Return the version that an `ETag` tells; None for one that could not be sent back as it is."""
    tag = tag.strip()
    if _TAG.fullmatch(tag):
        bare = tag.removeprefix('"').removesuffix('"')
        return bare if tag[0] == '"' and _is_plain(bare) else tag
    if _BARE.fullmatch(tag):
        return tag if _is_plain(tag) else f'"{tag}"'
    return None


def tag_of(version: str) -> str | None:
    """Return the entity tag of a version that a read told; None if no read could have told it."""
    if _TAG.fullmatch(version):
        return version
    return f'"{version}"' if _BARE.fullmatch(version) else None


def _is_plain(opaque: str) -> bool:
    """Whether a tag can be told without its quotes, and be taken for nothing else."""
    return opaque not in ("", "*") and not opaque.startswith("W/")


def demand_of(native: Json, arguments: Json) -> Demand | None:
    """Return what a call demands of what it changes, however that is stated; None if nothing of this kind."""
    stated: dict[str, str] = {}
    for name, value in _stated(native, arguments):
        stated.setdefault(name, value.strip())
    if (version := version_in(stated)) is not None:
        return "any" if version == "*" else "version"
    return "none" if stated.get("if-none-match") == "*" else None


def version_in(headers: Mapping[str, str]) -> str | None:
    """Return the version that the headers of a request state: a tag, `*`, or a time. None if they state none."""
    found = {name.lower(): value.strip() for name, value in headers.items()}
    # A time is not looked at beside a tag (RFC 9110, 13.1.4).
    return found.get("if-match", found.get("if-unmodified-since"))


def tells_version(native: Json) -> bool:
    """Whether the tag of an operation's answer may be sent back with a write."""
    return NATIVE in native or READ_BY in native


def is_conditional(native: Json, arguments: Json) -> bool:
    """Whether a call depends on the version of what it changes, so that it would be refused for its own effect."""
    return next(_stated(native, arguments), None) is not None


def _stated(native: Json, arguments: Json) -> Iterator[tuple[str, str]]:
    """List the conditions of a call, as headers: of its overlay, of its document, and of its own description."""
    if native.get("protocol") not in PROTOCOLS:
        return
    own = native[NATIVE]["argument"] if NATIVE in native else None
    version: Any = None if own is None else arguments.get(own)
    if version is not None:
        yield ("if-none-match", "*") if version == "" else ("if-match", str(version))
    for one in native.get("parameters", ()):
        name, argument = str(one.get("name")).lower(), one.get("argument")
        value = None if argument == own else arguments.get(argument)
        if one.get("in") == "header" and name in HEADERS and value is not None:
            yield name, str(value)
    headers: dict[str, str] = native.get("headers") or {}
    for written, template in headers.items():
        if (name := written.lower()) not in HEADERS:
            continue
        alone = _NAMED.fullmatch(template)
        if alone is None or arguments.get(alone[1]) is not None:
            yield name, _NAMED.sub(lambda match: str(arguments.get(match[1], "")), template)
