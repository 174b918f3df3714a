"""Versions and the ranges that select among them.

A version is SemVer 2.0.0 in the manifest's lower-case alphabet. A spec is an exact version, `LATEST` (also when
omitted), `MAJOR.x`, or a range as npm writes it. A range is a choice of conjunctions of comparators:

    ^1.2.0 || >=3.1.0 <4   =   (>=1.2.0 and <2.0.0-0) or (>=3.1.0 and <4.0.0-0)

The answer is the highest match by SemVer precedence, whatever the order of publication; versions that are not
deprecated go before those that are, and a pre-release is found only by a comparator that names one of the same
MAJOR.MINOR.PATCH. Upper bounds carry `-0`, the lowest pre-release, so that `^1.2.0` stops before `2.0.0-a`.

The grammar is narrower than npm on purpose, because tokens carry ranges too: an empty alternative (`^1.0.0 ||`) is
refused rather than read as any version, and so is a number after a wildcard (`1.x.3`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import dataclass

Bump = Literal["none", "patch", "minor", "major"]

LONGEST = 256  # characters in a version or a spec

_LISTED = 20  # versions named in a message; the details hold all of them
_VERSION = expression(r"[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9.]+)?(\+[a-z0-9.]+)?")
_SEMVER = expression(r"([0-9]+)\.([0-9]+)\.([0-9]+)(?:-([0-9A-Za-z.-]+))?(?:\+([0-9A-Za-z.-]+))?")
_NUMBER = r"0|[1-9][0-9]*|[xX*]"
_TAG = r"[0-9A-Za-z.-]+"
_BLOCK = expression(
    rf"(?P<op><=|>=|<|>|=|\^|~>|~|)v?(?P<major>{_NUMBER})(\.(?P<minor>{_NUMBER})(\.(?P<patch>{_NUMBER})"
    rf"(-(?P<prerelease>{_TAG}))?(\+(?P<build>{_TAG}))?)?)?"
)
_HYPHEN = expression(r"(?P<low>[^ ]+) +- +(?P<high>[^ ]+)")
_SPACED_OPERATOR = expression(r"(<=|>=|<|>|=|\^|~>|~) +")


@dataclass(frozen=True, slots=True)
class Version:
    """A version, comparable by its `precedence` (without build metadata) or, for a total order, its `order`."""

    text: str
    core: tuple[int, int, int]
    prerelease: tuple[str, ...]
    build: tuple[str, ...]
    precedence: Any
    order: Any

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Comparator:
    op: str
    version: Version

    def admits(self, version: Version) -> bool:
        if self.op == "=" and self.version.build and self.version.build != version.build:
            return False
        return _OPERATORS[self.op](version.precedence, self.version.precedence)


_Conjunction = tuple[_Comparator, ...]

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def parse_version(text: str) -> Version:
    """Parse the version of a manifest; E3105 if it is not SemVer 2.0.0 in the manifest's alphabet."""
    try:
        if len(text) <= LONGEST and _VERSION.fullmatch(text):
            return _version(text)
    except ValueError:
        pass  # a leading zero or an empty identifier: the pattern allows it, SemVer does not
    raise Failure(
        "E3105", f"`{text[:LONGEST]}` is not a version: write MAJOR.MINOR.PATCH as in `1.4.0` or `2.0.0-rc.1`"
    )


def resolve(spec: str | None, versions: Collection[str], *, deprecated: Collection[str] = ()) -> str:
    """Return the highest registered version that the spec selects; E3102 if there is none, E3004 if the spec is
    invalid.
    """
    matching = _candidates(spec, versions)
    if not matching:
        wanted = "any release" if spec is None else f"`{spec}`"
        raise _without(versions, "E3102", f"no version matches {wanted}")
    return _best(matching, deprecated)


def common(specs: Sequence[str | None], versions: Collection[str], deprecated: Collection[str] = ()) -> str:
    """Return the highest registered version that every spec selects; E3103 if they have none in common.

    An omitted spec or `LATEST` selects nothing: a token or a pin decides then. Each of the others must admit the
    version by itself, so a request for a pre-release does not widen a token that names releases only.
    """
    selecting = [spec for spec in specs if not _is_latest(spec)]
    sets = [_candidates(spec, versions) for spec in selecting or (None,)]
    matching = set[str].intersection(*sets)
    if not matching:
        listed = ", ".join(f"`{spec}`" for spec in selecting) or "any release"
        raise _without(versions, "E3103", f"no version satisfies all of {listed}")
    return _best(matching, deprecated)


def highest(versions: Iterable[str]) -> str | None:
    """Return the highest of the versions by precedence, pre-releases included; None if there are none."""
    return max(versions, key=_order, default=None)


def predecessor(version: str, versions: Iterable[str]) -> str | None:
    """Return the release that a new version is compared with: the highest below it, without pre-releases.

    Pre-releases promise nothing (SemVer 9). If they were compared with, a breaking change could enter a minor line
    through one.
    """
    new = parse_version(version)
    lower = (other for other in map(parse_version, versions) if other.precedence < new.precedence)
    return highest(other.text for other in lower if not other.prerelease)


def bump_between(old: str, new: str) -> Bump:
    """Return which part of the version rises: `none` if the new one is not higher, `patch` between
    pre-releases of one.
    """
    before, after = parse_version(old), parse_version(new)
    if after.precedence <= before.precedence:
        return "none"
    parts: tuple[Bump, ...] = ("major", "minor", "patch")
    for part, was, now in zip(parts, before.core, after.core, strict=True):
        if was != now:
            return part
    return "patch"


def may_break(old: str, new: str) -> bool:
    """Whether the step may break callers: a major bump, or a minor one while the major version stays 0."""
    bump = bump_between(old, new)
    unstable = parse_version(old).core[0] == parse_version(new).core[0] == 0
    return bump == "major" or (unstable and bump == "minor")


@lru_cache(maxsize=4096)
def _version(text: str) -> Version:
    """Parse any SemVer 2.0.0 text; ValueError for the rest."""
    match = _SEMVER.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text}` is not a version")
    major, minor, patch = map(_number, match.group(1, 2, 3))
    prerelease, build = (tuple(part.split(".")) if part else () for part in match.group(4, 5))
    if not all(prerelease + build):
        raise ValueError(f"`{text}` has an empty identifier")
    core = major, minor, patch
    # SemVer 11: a release comes after its pre-releases; numbers are compared as such, and come before words.
    precedence = core, not prerelease, tuple(map(_identifier, prerelease))
    return Version(
        text=text,
        core=core,
        prerelease=prerelease,
        build=build,
        precedence=precedence,
        # Builds `1` and `01` are equal as numbers; the text decides, so that the answer never depends on order.
        order=(precedence, tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in build), text),
    )


def _number(text: str) -> int:
    if text != "0" and text.startswith("0"):
        raise ValueError(f"`{text}` has a leading zero")
    return int(text)


def _identifier(text: str) -> tuple[int, int, str]:
    return (0, _number(text), "") if text.isdigit() else (1, 0, text)


def _order(text: str) -> Any:
    return parse_version(text).order


def _best(matching: Collection[str], deprecated: Collection[str]) -> str:
    return max([text for text in matching if text not in deprecated] or matching, key=_order)


def _is_latest(spec: str | None) -> bool:
    return spec is None or spec.strip(" ").lower() == "latest"


def _candidates(spec: str | None, versions: Collection[str]) -> set[str]:
    """Return every registered version that the spec admits. A spec that names one exactly means that one."""
    text = "*" if spec is None or _is_latest(spec) else spec.strip(" ")
    if text in versions:
        return {text}
    alternatives = _parse(text)
    return {each for each in versions if _admits(alternatives, parse_version(each))}


def _admits(alternatives: tuple[_Conjunction, ...], version: Version) -> bool:
    return any(all(one.admits(version) for one in every) and _requested(every, version) for every in alternatives)


def _requested(every: _Conjunction, version: Version) -> bool:
    """Whether a pre-release was requested: by a comparator that names one of the same core."""
    return not version.prerelease or any(one.version.prerelease and one.version.core == version.core for one in every)


def _without(versions: Collection[str], code: str, message: str) -> Failure:
    available = sorted(versions, key=_order, reverse=True)
    more = f" and {len(available) - _LISTED} more" if len(available) > _LISTED else ""
    listed = ", ".join(available[:_LISTED]) + more if available else "none"
    return Failure(code, f"{message}; available: {listed}", details={"available": available})


@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[_Conjunction, ...]:
    """Parse a spec into a choice of conjunctions; E3004 if it is invalid."""
    if len(text) > LONGEST:
        raise _malformed(text[:40] + "…", f"it is longer than {LONGEST} characters")
    try:
        return tuple(_conjunction(part.strip(" ")) for part in text.split("||"))
    except ValueError as error:
        raise _malformed(text, str(error)) from None


def _malformed(spec: str, why: str) -> Failure:
    return Failure(
        "E3004",
        f"`{spec}` is not a version or range: {why}; write `1.2.3`, `LATEST`, `1.x`, `^1.2.0` or `>=1.2.0 <2.0.0`",
    )


def _conjunction(text: str) -> _Conjunction:
    if not text:
        raise ValueError("a part of it is empty")
    if hyphen := _HYPHEN.fullmatch(text):
        low, high = hyphen["low"], hyphen["high"]
        if any(end[0] in "<>=^~" for end in (low, high)):
            raise ValueError("a hyphen range takes no operators")
        return _comparators(f">={low}") + _comparators(f"<={high}")
    blocks = _SPACED_OPERATOR.sub(r"\1", text).split()
    return tuple(one for block in blocks for one in _comparators(block))


def _comparators(block: str) -> _Conjunction:
    """Parse one block, such as `^1.2` or `<3.0.0`, into plain comparators."""
    match = _BLOCK.fullmatch(block)
    if match is None:
        raise ValueError(f"`{block}` is not understood")
    op = match["op"].replace("~>", "~")
    given = [None if part in (None, "x", "X", "*") else int(part) for part in match.group("major", "minor", "patch")]
    known = given.index(None) if None in given else 3
    if any(part is not None for part in given[known:]) or (known < 3 and (match["prerelease"] or match["build"])):
        raise ValueError(f"`{block}` has something after a wildcard")
    numbers = [part or 0 for part in given]
    if known == 0:
        return _below([0, 0, 0]) if op in ("<", ">") else _at_least([0, 0, 0])
    if known == 3:
        return _exact(op, numbers, _version(block[len(match["op"]) :].removeprefix("v")))
    return _partial(op, numbers, known)


def _exact(op: str, numbers: list[int], version: Version) -> _Conjunction:
    """Return the comparators of an operator before a full version."""
    low = (_Comparator(">=", version),)
    if op == "^":
        return low + _below(_raised(numbers, _caret_place(numbers, 3)))
    if op == "~":
        return low + _below(_raised(numbers, 1))
    return (_Comparator(op or "=", version),)


def _partial(op: str, numbers: list[int], known: int) -> _Conjunction:
    """Return the comparators of an operator before a version whose end is left open."""
    upper = _raised(numbers, known - 1)
    if op == "^":
        return _at_least(numbers) + _below(_raised(numbers, _caret_place(numbers, known)))
    if op in ("", "=", "~"):
        return _at_least(numbers) + _below(upper)
    return {">": _at_least(upper), ">=": _at_least(numbers), "<": _below(numbers), "<=": _below(upper)}[op]


def _caret_place(numbers: list[int], known: int) -> int:
    """Return the place a caret may not raise: the first that is not zero, or the last one given."""
    return next((place for place in range(known) if numbers[place]), known - 1)


def _raised(numbers: list[int], place: int) -> list[int]:
    return [*numbers[:place], numbers[place] + 1, *([0] * (2 - place))]


def _at_least(numbers: list[int]) -> _Conjunction:
    if not any(numbers):
        return ()  # only pre-releases of 0.0.0 lie below, and these must be requested explicitly
    return (_Comparator(">=", _version(".".join(map(str, numbers)))),)


def _below(numbers: list[int]) -> _Conjunction:
    return (_Comparator("<", _version(".".join(map(str, numbers)) + "-0")),)
