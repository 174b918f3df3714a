"""The facts of a call's arguments that rules can match: paths, hosts, URLs, commands and resources, in normal form.

Every value is converted to its normal form before any rule sees it, and a value without one is refused (E3206) rather
than guessed. The kind of an argument follows from three sources:

- its schema marks it, wherever in the schema that is: `format: path`, `format: uri`, `format: hostname`, `x-path`,
  `x-url`, `x-host`, `x-command`. A mark on a list or an object applies to all texts in it;
- a rule compares it with a path, a URL or a host: `context.arguments.file like "/srv/*"`;
- it looks like a URL or a path.

The sets contain too much rather than too little, which is the safe side for a rule that forbids. Each set also contains
what encloses the value: a path with all its ancestors, a host with its parent domains, a URL with the prefixes of its
path. `context.paths.contains("/etc")` means: some path is in or under /etc. For rules that permit there are
`all_paths`, `all_hosts` and `all_urls`, which contain what encloses every value: `context.all_paths.contains("/srv")`
means that all paths are in or under /srv, and that there is one. `all_commands` contains the program that is started,
as written, if it is the only one.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, cast

from interlock.authority.command_paths import paths_of, pieces
from interlock.authority.commands import read_command
from interlock.authority.comparisons import (
    LIKE,
    MAYBE_HOST,
    NOTHING_COMPARED,
    PIECES,
    Compared,
    normal_pattern,
    of_patterns,
    wild,
)
from interlock.authority.normalize import (
    BLANKS,
    ancestors,
    climbs,
    normal_host,
    normal_path,
    normal_url,
    other_reading,
    parents,
    prefixes,
    written_path,
)
from interlock.contract.effects import Change, predict
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.bounds import plain_text
from interlock.data.subschemas import COMMAND, HOST, PATH, URL, Place

if TYPE_CHECKING:
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json

SETS = ("paths", "hosts", "urls", "commands", "resources")
ALL = {"all_paths": "paths", "all_hosts": "hosts", "all_urls": "urls", "all_commands": "commands"}

# Cedar reads objects with these keys as something other than data: an argument must not forge an entity.
ESCAPES = frozenset({"__entity", "__extn", "__expr"})
MAX_DEPTH = 64
# Longer than any path can be: a text above this is not taken for a path.
_LONGEST_PATH = 5000

_FORMS = frozenset({PATH, URL, HOST})
_NONE: frozenset[str] = frozenset()
_RESOURCES = frozenset({"resources"})
_NO_TEXTS = frozenset((int, float, bool, type(None)))
_LOOKS_LIKE_URL = expression(
    r"[\x00-\x20]*(?:(?:[a-z][a-z0-9+.-]*:)+[/\\]{2}|(?:https?|wss?|ftp):|[/\\]{2})", re.IGNORECASE
)
_HAS_SCHEME = expression(r"[\x00-\x20]*[a-z]", re.IGNORECASE)
_LOOKS_LIKE_PATH = expression(r"/|\.{1,2}(?:/|\Z)|~[^/\s]*(?:/|\Z)|file:|.*/\.\.(?:/|\Z)", re.IGNORECASE | re.DOTALL)
# Every text that looks like a URL or a path has one of these.
_MAY_LOOK = expression(r"[/\\:~.]")
_BRACKETED = expression(r"\[([0-9a-fA-F:.]+)\]")
_LARGEST = Decimal("922337203685477.5807")


def facts(
    contract: Contract,
    arguments: Mapping[str, Any],
    names: Iterable[str] | None,
    wanted: frozenset[str],
    compared: Compared = NOTHING_COMPARED,
) -> Json:
    """Return the wanted sets, and `arguments` (all, or those named) as Cedar values; E3206 for values without a normal
    form.

    `compared` states what the rules compare each argument with. Sets are sorted: the same call always gives the same
    bytes.
    """
    sent = set(arguments) if names is None else arguments.keys() & set(names)
    seen = _Seen(contract, wanted)
    # Values that no rule reads cannot prevent a decision.
    normal = seen.members(arguments, arguments.keys() if wanted - {"arguments"} else sent, compared)
    result: Json = {}
    if "arguments" in wanted:
        result["arguments"] = _record({name: normal[name] for name in sorted(sent)}, seen.root, "", 0)
    if "resources" in wanted:
        seen.predict(normal)
    result.update({name: sorted(seen.sets[name]) for name in SETS if name in wanted})
    result.update({name: sorted(seen.shared.get(of, ())) for name, of in ALL.items() if name in wanted})
    return result


def resources_of(contract: Contract, arguments: Mapping[str, Any]) -> list[str]:
    """Return the resources that a call with these arguments uses; E3206 for a value without a normal form."""
    changes = changes_of(contract, arguments)
    if changes is not None:
        return names_of(changes)
    seen = _Seen(contract, _RESOURCES)
    seen.predict(seen.members(arguments, arguments, NOTHING_COMPARED))
    return sorted(seen.sets["resources"])


def changes_of(contract: Contract, arguments: Mapping[str, Any]) -> tuple[Change, ...] | None:
    """Return the changes that a call with these arguments may make, if they use no other resources.

    None if an argument may be a path, a URL or a host: then resources have to be looked for, and brought into normal
    form. Most calls have numbers and plain texts only.
    """
    places = contract.input.places
    if places.blind is not None:
        return None
    for name, value in arguments.items():
        if value.__class__ in _NO_TEXTS:
            continue
        if value.__class__ is not str or name not in places.root.unmarked or _MAY_LOOK.search(value) is not None:
            return None
    return predict(contract.mutation.effects, arguments)


def names_of(changes: Iterable[Change]) -> list[str]:
    """Return the resources that changes name; E3206 for one that is not in normal form."""
    names = {change.resource for change in changes}
    for name in names:
        if climbs(name.partition(":")[2]):
            raise Failure("E3206", f"the call would change `{name[:100]}`, which is not in normal form")
    return sorted(names)


def _is_more(text: str, place: Place) -> bool:
    """Whether a text is marked as a path, a URL, a host or a command, or may look like one."""
    return bool(place.kinds or place.negated) or _MAY_LOOK.search(text) is not None


def as_written(
    contract: Contract, arguments: Mapping[str, Any], path: str, compared: Compared = NOTHING_COMPARED
) -> str:
    """Return a path of the call as it was written: the caller need not learn where links on this machine lead."""
    seen = _Seen(contract, frozenset({"paths"}))
    seen.members(arguments, arguments, compared)
    return plain_text(seen.written.get(path, path), _LONGEST_PATH)


def in_normal_form(
    contract: Contract, patterns: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Json, Json] | None:
    """Normalise patterns and arguments so that they can be compared.

    None if an argument that would be compared with a pattern with `*` or `?` has no normal form.
    """
    from interlock.contract.argument_bounds import innermost, with_innermost

    compared = of_patterns(patterns)
    inner = {name: innermost(one) for name, one in patterns.items() if name in arguments}
    held = {name: one for name, one in inner.items() if isinstance(one, str) and wild(one)}
    try:
        seen = _Seen(contract, frozenset({"arguments"}))
        values = seen.members(arguments, held, compared)
    except Failure:
        return None
    resolved = {
        name: with_innermost(patterns[name], normal_pattern(one))
        for name, one in held.items()
        if PATH in compared.below(name).readings
    }
    return {**patterns, **resolved}, {**arguments, **values}


class _Seen:
    """The facts found while walking through the arguments along their schema."""

    def __init__(self, contract: Contract, wanted: frozenset[str]) -> None:
        self._contract = contract
        self.root = contract.input.places.root
        self._here = contract.runs_here
        self._paths = not wanted.isdisjoint(("paths", "all_paths", "resources"))
        self._urls = not wanted.isdisjoint(("urls", "hosts", "all_urls", "all_hosts", "resources"))
        self._commands = not wanted.isdisjoint(("commands", "all_commands"))
        self._arguments = "arguments" in wanted
        self.sets: defaultdict[str, set[str]] = defaultdict(set)
        # What encloses every path, host and URL found so far.
        self.shared: dict[str, set[str]] = {}
        # Paths that are written differently, through links or relative to some directory.
        self.written: dict[str, str] = {}
        blind = contract.input.places.blind
        if blind is not None:
            raise Failure("E3206", f"the schema of {contract.ref} cannot be followed everywhere: {blind}")

    def members(self, arguments: Mapping[str, Any], names: Iterable[str], compared: Compared) -> Json:
        """Record the facts of some arguments and return them in normal form."""
        normal: Json = {}
        for name in names:
            value = arguments[name]
            if value.__class__ not in _NO_TEXTS:
                value = self.value(value, self.root.member(name), name, _NONE, compared.below(name))
            normal[name] = value
        return normal

    def predict(self, normal: Json) -> None:
        """Record the resources that the effects of the tool name."""
        self.sets["resources"].update(names_of(predict(self._contract.mutation.effects, normal)))

    def value(
        self, value: Any, place: Place, where: str, given: frozenset[str], compared: Compared, depth: int = 0
    ) -> Any:
        """Record the facts of a value and return it with its paths, URLs and hosts in normal form.

        `given` are the marks of the enclosing value.
        """
        if depth > MAX_DEPTH:
            raise Failure("E3206", f"argument `{where}` is nested too deeply for policy to look at")
        kinds = place.kinds | given if given else place.kinds
        if isinstance(value, str):
            if not (kinds or compared.readings or _is_more(value, place)):
                return value  # nothing says that it is more than a text, and it does not look like more
            return self._text(value, kinds, place.negated, where, compared.readings)
        if isinstance(value, list | tuple):
            items = cast("list[Any]", value)
            if items and COMMAND in kinds and all(isinstance(item, str) for item in items):
                self._command(shlex.join(items), where)
                # Without a shell the first word is the program, whatever it looks like.
                self.sets["commands"].update((items[0], os.path.basename(items[0])))
            down = kinds & _FORMS
            return [
                self.value(item, place.element(at), f"{where}.{at}", down, compared, depth + 1)
                for at, item in enumerate(items)
            ]
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            down = kinds & _FORMS
            for name in named:
                self._text(name, place.names.kinds, place.names.negated, where, _NONE)
            return {
                name: self.value(item, place.member(name), f"{where}.{name}", down, compared.below(name), depth + 1)
                for name, item in named.items()
            }
        return value

    def _text(
        self, text: str, kinds: frozenset[str], negated: frozenset[str], where: str, readings: frozenset[str]
    ) -> str:
        if COMMAND in kinds:
            self._command(text, where)
        forms = kinds & _FORMS or readings & _FORMS
        if forms:
            return self._formed(text, forms, where)
        if COMMAND in kinds:
            return _simple(text, where) if LIKE in readings else text
        self._looks(text, where)
        for kind in negated:
            _try(lambda kind=kind: self._formed(text, frozenset({kind}), where))
        if PIECES in readings and climbs(text):
            raise Failure("E3206", f"argument `{where}` has `.` or `..` between slashes; write it without them")
        if MAYBE_HOST in readings:
            return _try(lambda: normal_host(text, where)) or text
        return text

    def _formed(self, text: str, forms: frozenset[str], where: str) -> str:
        """Record a text that is marked, or compared, as one of these kinds, and return its normal form."""
        looks_like_url = _LOOKS_LIKE_URL.match(text) is not None
        if URL in forms and (len(forms) == 1 or (looks_like_url and text[0] not in "/\\")):
            wanted = self._urls or self._arguments or (self._paths and "file:" in text.lower())
            if self._arguments and other_reading(text) is not None:
                words = "is a URL with a backslash, whose host depends on who reads it; write it without one"
                raise Failure("E3206", f"argument `{where}` {words}")
            return self._url(text, where) if wanted else text
        if PATH in forms and (HOST not in forms or "/" in text or text[:1] in (".", "~")):
            if self._urls and looks_like_url:
                self._url_in_path(text, where)
            return self._path(text, where, here=self._here) if self._paths or self._arguments else text
        if PATH in forms and self._paths:
            _try(lambda: self._path(text, where, here=self._here))
        if not (self._urls or self._arguments):
            return text
        return self._host(normal_host(text.strip(BLANKS).strip("[]"), where))

    def _url_in_path(self, text: str, where: str) -> None:
        if _HAS_SCHEME.match(text):
            self._url(text, where)
        else:
            _try(lambda: self._url(text, where))  # `//x/y` is a path as well

    def _looks(self, text: str, where: str) -> None:
        if self._urls and _LOOKS_LIKE_URL.match(text):
            self._url(text, where)
        bare = text.strip()
        if self._paths and _LOOKS_LIKE_PATH.match(bare):
            self._path(bare, where)

    def _path(self, text: str, where: str, *, here: bool = True) -> str:
        path = normal_path(text, where, here=here)
        around = set(ancestors(path))
        self._share("paths", around)
        # A rule may name a directory by a symbolic link.
        written = written_path(text)
        self.sets["paths"].update(around if written in (None, path) else around.union(ancestors(written)))
        if written != path:
            self.written[path] = written or text
        self.sets["resources"].add(f"file:{path}")
        return path

    def _url(self, text: str, where: str) -> str:
        if (other := other_reading(text)) is not None:
            self._url(other, where)
        url, host = normal_url(text, where)
        around = set(prefixes(url))
        self._share("urls", around)
        self.sets["urls"].update(around)
        self.sets["resources"].add(url)
        if host:
            self._host(host)
        if url.startswith("file:"):
            self._path(text.strip(BLANKS), where)
        elif not host and _LOOKS_LIKE_URL.match(rest := url.partition(":")[2]):
            self._url(rest, where)  # jdbc:mysql://host, view-source:https://host
        return url

    def _host(self, host: str) -> str:
        around = set(parents(host))
        self._share("hosts", around)
        self.sets["hosts"].update(around)
        return host

    def _share(self, name: str, around: set[str]) -> None:
        known = self.shared.get(name)
        self.shared[name] = around if known is None else known & around

    def _command(self, text: str, where: str) -> None:
        looks = self._paths or self._urls
        if not (looks or self._commands):
            return
        reading = read_command(text, where)
        if self._commands:
            self.sets["commands"].add(text)
            self.sets["commands"].update(reading.programs)
            self._share("commands", reading.started if len(reading.started) == 1 else set())
        if not looks:
            return
        for at, word in enumerate(reading.words):
            if not word.fixed:
                shown = word.raw[:60]
                words = f"has a word that only a shell can expand: `{shown}`; write it out"
                raise Failure("E3206", f"argument `{where}` {words}")
            for piece in pieces(word.text):
                self._looks(piece, where)
                if self._urls and (at or "=" in word.text):
                    self._bare_host(piece, where)
        if self._urls:
            for address in _BRACKETED.findall(text):
                self._bare_host(address, where)
        if self._paths:
            for path in paths_of(reading.words, where):
                self._path(path, where)
        # Text that is data to the shell, such as a here-document, is searched as written.
        for word in re.split(r"[\s;|&()<>`'\"=]+", text):
            self._looks(word, where)

    def _bare_host(self, piece: str, where: str) -> None:
        """Record a word of a command that can be a host: `example.org`, `example.org/x`, `localhost`, `2130706433`."""
        host = piece.partition("/")[0]
        if host and not host.startswith(("-", ".")):
            normal = _try(lambda: normal_host(host, where))
            if normal:
                self._host(normal)


def _try(make: Callable[[], str]) -> str | None:
    """Return a normal form, if a text has one."""
    try:
        return make()
    except Failure:
        return None


def _simple(text: str, where: str) -> str:
    """Normalise a command that rules compare as text: one program and its words, each as the program
    would receive it.
    """
    words = read_command(text, where).simple
    if words is None:
        why = "is compared as text, and is more than one program with plain words; use context.commands in the rule"
        raise Failure("E3206", f"argument `{where}` {why}")
    return shlex.join(words)


# Arguments as Cedar values


def _express(value: Any, place: Place, where: str, depth: int) -> Any:
    """Convert a value to Cedar's JSON. Nulls are absent; a `number` is always a decimal; other values are refused."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _cannot(where, "is not valid text")
        return value
    if isinstance(value, int | float):
        return _number(value, "number" in place.types, where)
    if depth > MAX_DEPTH:
        raise _cannot(where, "is nested too deeply")
    if isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
        return [_express(item, place.element(at), where, depth + 1) for at, item in items if item is not None]
    if isinstance(value, dict):
        return _record(cast("Json", value), place, where, depth)
    raise _cannot(where, "is of a kind policy does not know")


def _record(value: Json, place: Place, where: str, depth: int) -> Json:
    if forged := ESCAPES & value.keys():
        raise _cannot(where or min(forged), f"uses the reserved name `{min(forged)}`")
    prefix = f"{where}." if where else ""
    return {
        name: _express(item, place.member(name), f"{prefix}{name}", depth + 1)
        for name, item in value.items()
        if item is not None
    }


def _number(value: float, always_decimal: bool, where: str) -> Any:
    if isinstance(value, int) and not always_decimal:
        if not -(2**63) <= value < 2**63:
            raise _cannot(where, "is too large")
        return value
    try:
        exact = Decimal(repr(value))
        fits = exact.is_finite() and abs(exact) <= _LARGEST and exact == exact.quantize(Decimal("0.0001"))
    except InvalidOperation:
        fits = False
    if not fits:
        raise _cannot(where, "is not a decimal of at most four places")
    return {"__extn": {"fn": "decimal", "arg": f"{Decimal(repr(value)):.4f}"}}


def _cannot(where: str, why: str) -> Failure:
    return Failure("E3206", f"argument `{where}` {why}, so no rule can look at it")
