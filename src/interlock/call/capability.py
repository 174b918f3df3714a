"""Capability tokens: what they grant, and the algebra in which grants only shrink.

A capability is a chain of links from the person or system it began with to its current holder:

    user ─► agent ─► (sub-agent …)

Each link names its subject, the tools it may call, the scopes, the resources, the constraints and the period. A link
may never hold more than the one above it: that is checked when it is issued, when it is verified, and once more at
every call, where *every* link of the chain must cover the request.

Names are compared letter for letter. A scope is a plain name: `mail:*` is a scope of that name and no pattern. Tools
are patterns (`ns.name`, `ns.*`, `*`) in a range of versions, where `*` is any version, pre-releases included. Resources
are exact, or prefixes that end in `*`.

Whether one range lies within others is decided exactly, by testing points. A range can change its answer only at a
version it names, or where a component of one is raised (`^1.2.3` ends at `2.0.0`). Between two such edges its answer is
constant; so it is enough to test each edge and the version right behind it, of releases and of pre-releases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, cast

from interlock.contract.versions import parse_version, resolve
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import dataclass

MOST = 100  # entries in any list of a link
LONGEST_RANGE = 64
MOST_VERSIONS = 8  # named in one range: the cost of a check is bounded for every token
DEEPEST = 8  # links in a chain
# The constraint that says for which tenant, task, turn, skill or peer agent a token was issued. It limits no call: the
# token has a surface of its own, and the surface tells it as its scope.
SURFACE = "surface"

CLASSES = ("read_only", "write_reversible", "write_irreversible")  # from the weakest to the strongest

_SCOPE = expression(r"[a-z0-9_.:/*-]{1,255}\Z")
_TOOL = expression(r"(\*|[a-z][a-z0-9_-]{0,254}\.(\*|[a-z][a-z0-9_]{0,254}))\Z")
_RANGE = expression(r"[0-9a-z.*<>=^~|+ -]+\Z")
_NAMED = expression(r"([0-9]+)(?:\.([0-9]+|[x*]))?(?:\.([0-9]+|[x*]))?(-[0-9a-z.-]+)?(\+[0-9a-z.-]+)?")
_RESOURCE = expression(r"[!-)+-~]*\*?\Z")  # visible ASCII; a star only at the end
_SCHEME = expression(r"[a-z][a-z0-9+.-]*:(//)?")
_HIDDEN = expression(r"%(2e|2f|5c|25|00)", re.IGNORECASE)
_UNSEEN = expression("[\x00-\x20\x7f-\x9f\\\\]")
_JTI = expression(r"[A-Za-z0-9_.:/~+=-]{1,256}\Z")
_DID = expression(r"did:[a-z0-9]+:[A-Za-z0-9._:%-]*[A-Za-z0-9._%-]\Z")
_ENVIRONMENT = expression(r"[a-z0-9][a-z0-9_.-]{0,63}\Z")
_SURFACE = expression(r"(tenant|workspace|session|peer_agent|(task|turn|skill|peer_agent):[!-~]{1,200})\Z")


AS_ABOVE = ""  # the range of a grant that names none: whatever the link above it allows


@dataclass(frozen=True, slots=True)
class ToolGrant:
    """A tool (`ns.name`), all of a namespace (`ns.*`) or all tools (`*`), in a range of versions."""

    tool: str
    versions: str = "*"

    def names(self, tool: str) -> bool:
        """Whether this grant covers a tool, or each tool of a pattern."""
        mine = self.tool
        return mine == tool or mine == "*" or (mine[-2:] == ".*" and tool.startswith(mine[:-1]))

    def __str__(self) -> str:
        return self.tool if self.versions == "*" else f"{self.tool}@{self.versions}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One hop of delegation. `resources` of None means no restriction on resources."""

    jti: str
    subject: str
    scopes: frozenset[str]
    tools: tuple[ToolGrant, ...]
    not_before: int  # seconds since the epoch, as in the token
    expires: int
    resources: tuple[str, ...] | None = None
    constraints: Mapping[str, Any]

    def covers(self, tool: str, version: str) -> bool:
        for grant in self.tools:  # noqa: SIM110 - half the time of any(…), and it runs for every call
            if grant.names(tool) and holds(grant.versions, version):
                return True
        return False

    def covers_resource(self, resource: str) -> bool:
        if self.resources is None:
            return True
        return is_plain(resource) and any(_reaches(pattern, resource) for pattern in self.resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A verified chain, root first. `digest` is that of the token that carried it, `keys` identify the keys that signed
    it.

    `within` is set for calls that a tool makes: the resources of the parent call, beyond which they may not reach.
    """

    digest: str
    issuer: str
    links: tuple[Link, ...]
    keys: tuple[str, ...] = ()
    within: tuple[str, ...] | None = None
    # Whether any link names resources, whether one limits more than tools and resources, whether one limits the cost of
    # calls, and whether one allows a tool in some of its versions only.
    bound: bool = field(init=False, repr=False, compare=False)
    constrained: bool = field(init=False, repr=False, compare=False)
    capped: bool = field(init=False, repr=False, compare=False)
    narrows: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", any(link.resources is not None for link in self.links))
        bounds = [link.constraints for link in self.links]
        limited = any(name != SURFACE for one in bounds for name in one)
        object.__setattr__(self, "constrained", limited)
        object.__setattr__(self, "capped", any("max_cost" in one for one in bounds))
        grants = [grant for link in self.links for grant in link.tools]
        object.__setattr__(self, "narrows", any(grant.versions != "*" for grant in grants))

    @property
    def leaf(self) -> Link:
        return self.links[-1]

    @property
    def root(self) -> Link:
        return self.links[0]

    def names(self, tool: str) -> bool:
        """Whether every link of the chain allows this tool, in whatever versions."""
        return all(any(grant.names(tool) for grant in link.tools) for link in self.links)

    def covers(self, tool: str, version: str) -> bool:
        """Whether every link of the chain allows this version of this tool."""
        for link in self.links:  # noqa: SIM110 - as above
            if not link.covers(tool, version):
                return False
        return True

    def covers_resource(self, resource: str) -> bool:
        """Whether every link that names resources covers this one. A resource in an ambiguous form is never covered."""
        if self.within is not None and not any(_reaches(held, resource) for held in self.within):
            return False
        return all(link.covers_resource(resource) for link in self.links)


# Comparing links


def ranged(grants: Iterable[ToolGrant], above: Link | None) -> tuple[ToolGrant, ...]:
    """Fill in missing ranges: with that of the link above, or any version if there is none."""
    return tuple(
        grant if grant.versions != AS_ABOVE else ToolGrant(grant.tool, _range_above(grant.tool, above))
        for grant in grants
    )


def _range_above(tool: str, above: Link | None) -> str:
    ranges = [] if above is None else [other.versions for other in above.tools if other.names(tool)]
    return "*" if not ranges or "*" in ranges else " || ".join(dict.fromkeys(ranges))


def widenings(parent: Link, child: Link) -> list[str]:
    """List everything in which the child holds more than its parent; empty if it only shrinks."""
    more = [f"the scope `{scope}` is not held above" for scope in sorted(child.scopes - parent.scopes)]
    more += [_beyond(grant, parent) for grant in child.tools if not _within(grant, parent.tools)]
    more += _resource_widenings(parent.resources, child.resources)
    for name, bound in parent.constraints.items():
        if name == SURFACE:
            continue
        if name not in child.constraints:
            more.append(f"the constraint `{name}` is left out")
        elif not _tightens(name, bound, child.constraints[name]):
            more.append(
                f"the constraint `{name}` is loosened from {_words(bound)} to {_words(child.constraints[name])}"
            )
    if child.not_before < parent.not_before:
        more.append("it begins before the link above it")
    if child.expires > parent.expires:
        more.append("it ends after the link above it")
    return more


def _beyond(grant: ToolGrant, parent: Link) -> str:
    held = any(other.names(grant.tool) for other in parent.tools)
    if not held:
        return f"the tool `{grant}` is not held above"
    return f"the tool `{grant.tool}` is held above in {_range_above(grant.tool, parent)} only, not in {grant.versions}"


def _within(grant: ToolGrant, above: Iterable[ToolGrant]) -> bool:
    ranges = [other.versions for other in above if other.names(grant.tool)]
    return bool(ranges) and range_within(grant.versions, tuple(ranges))


def _resource_widenings(above: tuple[str, ...] | None, below: tuple[str, ...] | None) -> list[str]:
    if above is None:
        return []
    if below is None:
        return ["it reaches every resource, where the link above names some"]
    outside = [one for one in below if not any(_reaches(pattern, one) for pattern in above)]
    return [f"the resource `{one}` is not held above" for one in outside]


def _reaches(pattern: str, resource: str) -> bool:
    """Whether a resource, or everything that a narrower pattern covers, lies within a pattern."""
    return pattern == resource or (pattern[-1:] == "*" and resource.removesuffix("*").startswith(pattern[:-1]))


def _tightens(name: str, bound: Any, value: Any) -> bool:
    if name == "mutation_class":
        return CLASSES.index(value) <= CLASSES.index(bound)
    if name == "environments":
        return set(value) <= set(bound)
    return value <= bound


def _words(value: Any) -> str:
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else str(value)


def is_plain(resource: str) -> bool:
    """Whether a resource is unambiguous: no dot segments, empty segments, backslashes or encoded separators."""
    if not resource or _HIDDEN.search(resource) or _UNSEEN.search(resource):
        return False
    path = _SCHEME.sub("", resource, count=1)
    segments = path.split("/")
    return not any(segment in (".", "..") for segment in segments) and "" not in segments[1:-1]


# Ranges


@lru_cache(maxsize=8192)
def holds(versions: str, version: str) -> bool:
    """Whether a range admits a version; `*` admits any."""
    if versions == "*":
        return True
    try:
        resolve(versions, (version,))
    except Failure:
        return False
    return True


@lru_cache(maxsize=1024)
def range_within(inner: str, outer: tuple[str, ...]) -> bool:
    """Whether every version that the inner range admits is admitted by one of the outer ones."""
    if "*" in outer or inner in outer:
        return True
    if inner == "*":
        return False  # any version at all, which no other range covers
    points = {point for text in (inner, *outer) for point in _points(text)}
    return all(any(holds(each, point) for each in outer) for point in points if holds(inner, point))


@lru_cache(maxsize=1024)
def _points(versions: str) -> frozenset[str]:
    """Return the versions at and right behind each place where a range may change its answer."""
    points = {"0.0.0", "0.0.1"}
    for major, minor, patch, tag, build in _NAMED.findall(versions):
        numbers = [int(part) if part.isdigit() else 0 for part in (major, minor, patch)]
        raised = [[*numbers[:place], numbers[place] + 1, *([0] * (2 - place))] for place in range(3)]
        for one in (numbers, *raised):
            edge = ".".join(map(str, one))
            points |= {edge, f"{edge}-0", f"{edge}-0.0", f"{one[0]}.{one[1]}.{one[2] + 1}"}
        named = ".".join(map(str, numbers))
        # `.0` is the lowest identifier, so nothing lies between a pre-release and the same with `.0` behind it.
        points |= {f"{named}{end}" for end in (tag, tag and f"{tag}.0", build, tag + build)}
    return frozenset(points)


# Reading and writing links


LINK_CLAIMS = frozenset({"sub", "jti", "nbf", "exp", "tools", "scopes", "resources", "constraints", "act"})


def read_link(claims: Mapping[str, Any]) -> Link:
    """Read a link from a token's claims; E3203 with all faults."""
    faults = list(claim_faults(claims))
    if faults:
        raise Failure("E3203", f"the token is malformed: {'; '.join(faults)}", details={"faults": faults})
    resources = claims.get("resources")
    return Link(
        jti=claims["jti"],
        subject=claims["sub"],
        scopes=frozenset(claims.get("scopes", ())),
        tools=tuple(ToolGrant(each["tool_id"], each["version_range"]) for each in claims["tools"]),
        not_before=claims["nbf"],
        expires=claims["exp"],
        resources=None if resources is None else tuple(resources),
        constraints=dict(claims.get("constraints", {})),
    )


def read_above(act: Any) -> tuple[Link, ...]:
    """Read the links of a nested `act` claim, root first; E3203 if one is invalid."""
    links: list[Link] = []
    while act is not None:
        if not isinstance(act, dict):
            raise Failure("E3203", "the token is malformed: `act` must be an object")
        claims = cast("Mapping[str, Any]", act)
        # A restriction that is not understood must not be ignored.
        if unknown := sorted(claims.keys() - LINK_CLAIMS):
            raise Failure("E3203", f"the token is malformed: `act` has unknown claims: {', '.join(unknown)}")
        links.append(read_link(claims))
        if len(links) >= DEEPEST:
            raise Failure("E3203", f"the delegation chain is deeper than {DEEPEST} links")
        act = claims.get("act")
    return tuple(reversed(links))


def write_link(link: Link) -> dict[str, Any]:
    """Write a link as claims."""
    claims: dict[str, Any] = {
        "sub": link.subject,
        "jti": link.jti,
        "nbf": link.not_before,
        "exp": link.expires,
        "tools": [{"tool_id": grant.tool, "version_range": grant.versions} for grant in link.tools],
        "scopes": sorted(link.scopes),
        "constraints": dict(link.constraints),
    }
    if link.resources is not None:
        claims["resources"] = list(link.resources)
    return claims


def write_above(links: Sequence[Link]) -> dict[str, Any] | None:
    """Write links, root first, as a nested `act` claim."""
    act: dict[str, Any] | None = None
    for link in links:
        act = write_link(link) | ({} if act is None else {"act": act})
    return act


def link_faults(link: Link) -> list[str]:
    """List the reasons why a link cannot be issued."""
    return list(claim_faults(write_link(link)))


def claim_faults(claims: Mapping[str, Any]) -> Iterable[str]:
    """List the faults of a link's claims."""
    if not is_did(claims.get("sub")):
        yield "`sub` must be a DID, as in did:key:z6Mk…"
    if not _matches(_JTI, claims.get("jti")):
        yield "`jti` must be an id of up to 256 letters, digits and ._:/~+=-"
    for name in ("nbf", "exp"):
        if not _is_int(claims.get(name)):
            yield f"`{name}` must be a whole number of seconds"
    if _is_int(claims.get("nbf")) and _is_int(claims.get("exp")) and claims["exp"] <= claims["nbf"]:
        yield "it ends before it begins"
    yield from _tool_faults(claims.get("tools"))
    yield from _list_faults("scopes", claims.get("scopes", []), scope_fault)
    if "resources" in claims:
        yield from _list_faults("resources", claims["resources"], resource_fault)
    yield from _constraint_faults(claims.get("constraints", {}))


def is_jti(value: Any) -> bool:
    """Whether a value can be the id of a link."""
    return _matches(_JTI, value)


def is_did(value: Any) -> bool:
    """Whether a value has the form of a DID without path, query or fragment."""
    return isinstance(value, str) and len(value) <= 2048 and _DID.match(value) is not None


def scope_fault(scope: Any) -> str | None:
    """Describe the fault of a scope, or None."""
    return None if _matches(_SCOPE, scope) else f"the scope {_shown(scope)} must be of a-z, 0-9 and _.:/*-"


def tool_fault(tool: Any) -> str | None:
    """Describe the fault of a tool's name or pattern, or None."""
    return None if _matches(_TOOL, tool) else f"the tool {_shown(tool)} must be `ns.name`, `ns.*` or `*`"


def range_fault(versions: Any) -> str | None:
    """Describe the fault of a range of versions, or None."""
    if versions == "*":
        return None
    if not _matches(_RANGE, versions) or len(versions) > LONGEST_RANGE:
        return f"the version range {_shown(versions)} must be an npm range of up to {LONGEST_RANGE} characters"
    named = _NAMED.findall(versions)
    if not named or len(named) > MOST_VERSIONS:
        return f"the version range `{versions}` must name one to {MOST_VERSIONS} versions"
    try:
        resolve(versions, ())
    except Failure as failure:
        if failure.code != "E3102":
            return failure.message
    try:
        for *_, tag, build in named:
            parse_version(f"0.0.0{tag}{build}")
    except Failure:
        return f"the version range `{versions}` names a pre-release or build that no version can have"
    return None


def resource_fault(resource: Any) -> str | None:
    """Describe the fault of a resource or a prefix of resources, or None."""
    if _matches(_RESOURCE, resource) and len(resource) <= 512 and is_plain(resource):
        return None
    return f"the resource {_shown(resource)} must be plain ASCII without dot segments, with a `*` at most at its end"


def _tool_faults(tools: Any) -> Iterable[str]:
    if not isinstance(tools, list) or len(cast("list[Any]", tools)) > MOST:
        yield f"`tools` must be a list of at most {MOST}"
        return
    seen: set[str] = set()
    for entry in cast("list[Any]", tools):
        if not isinstance(entry, dict) or cast("dict[str, Any]", entry).keys() != {"tool_id", "version_range"}:
            yield "each of `tools` must be an object of `tool_id` and `version_range`"
            continue
        tool, versions = (cast("dict[str, Any]", entry)[name] for name in ("tool_id", "version_range"))
        fault = tool_fault(tool) or range_fault(versions)
        if fault is not None:
            yield fault
        elif tool in seen:
            yield f"the tool `{tool}` is listed twice; join its ranges with ||"
        else:
            seen.add(tool)


def _list_faults(name: str, values: Any, fault: Callable[[Any], str | None]) -> Iterable[str]:
    if not isinstance(values, list) or len(cast("list[Any]", values)) > MOST:
        yield f"`{name}` must be a list of at most {MOST}"
        return
    yield from (words for words in map(fault, cast("list[Any]", values)) if words is not None)


def _constraint_faults(constraints: Any) -> Iterable[str]:
    if not isinstance(constraints, dict):
        yield "`constraints` must be an object"
        return
    for name, value in cast("dict[str, Any]", constraints).items():
        known = _CONSTRAINTS.get(name)
        if known is None:
            # INVARIANT: a constraint that is not understood is not ignored.
            yield f"the constraint {_shown(name)} is not known; known are {', '.join(_CONSTRAINTS)}"
        elif not known[0](value):
            yield f"the constraint `{name}` must be {known[1]}"


def _is_int(value: Any) -> bool:
    return value.__class__ is int and abs(value) < 2**53


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _is_amount(value: Any) -> bool:
    return value.__class__ in (int, float) and math.isfinite(value) and 0 <= value < 2**53


def _is_class(value: Any) -> bool:
    return value in CLASSES


def _is_environments(value: Any) -> bool:
    names = cast("list[Any]", value) if isinstance(value, list) else []
    return 0 < len(names) <= MOST and all(_matches(_ENVIRONMENT, name) for name in names)


def _is_surface(value: Any) -> bool:
    return _matches(_SURFACE, value)


_CONSTRAINTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_uses": (_is_count, "a whole number from 1"),
    "max_cost": (_is_amount, "a number from 0"),
    "mutation_class": (_is_class, f"one of {', '.join(CLASSES)}"),
    "environments": (_is_environments, "a list of names in a-z, 0-9 and _.-"),
    SURFACE: (_is_surface, "task:ID, turn:ID, skill:ID, peer_agent, peer_agent:ID, session, workspace or tenant"),
}


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _shown(value: Any) -> str:
    return f"`{value[:64]}`" if isinstance(value, str) else f"of type {type(value).__name__}"
