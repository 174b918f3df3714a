"""Retirement of versions: announced, monitored, and recorded for good.

    active ─► deprecated ─► sunset ─► removed

A deprecated version still runs, and its callers are told until when. From its removal date it is refused; once a day
has passed without a single attempt, refused ones included, it is removed. The row stays as a tombstone, so that old
calls can still be read against the contract under which they were made.

`sweep` does what is due, and may be run at any time. When something is due follows from the store alone: the removal
date is in the version's notice, the last report among the store's facts, the usage in the journal. A restart loses
nothing, and two processes that sweep at once do nothing twice, because each version is judged inside one write.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import orjson

from interlock.contract.versions import resolve
from interlock.core.clock import iso, new_id
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple, dataclass
from interlock.data.schema import Json
from interlock.store import facts, ledger, records, tools
from interlock.store.port import Store, Transaction, Unit
from interlock.store.tools import Notice, bump_epoch

if TYPE_CHECKING:
    from interlock.contract.manifest import LifecycleState

Happening = Literal[
    "DEPRECATION_MIGRATION_PROGRESS",
    "DEPRECATION_MIGRATION_COMPLETE",
    "DEPRECATION_REMOVAL_BLOCKED",
    "TOOL_VERSION_REMOVED",
]

# The only order of states; nothing leads back, and nothing is skipped.
NEXT: Mapping[LifecycleState, LifecycleState] = {"active": "deprecated", "deprecated": "sunset", "sunset": "removed"}

GRACE_DAYS = 90
EXTEND_DAYS = 7
REPORT_DAYS = 7

_DAY_MS = 86_400_000
_PAGE = 2000  # records read at a time, so that calls go on meanwhile
# The codes with which a removed version is refused: past its date, or no longer selectable.
_GONE = ("E3102", "E3104")


@dataclass(frozen=True, slots=True)
class Usage:
    """Attempts to call a version, refused ones included, over seven days and over the last one."""

    week: int
    day: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """An event in a version's retirement. `removal_ms` is the current date."""

    event: Happening
    address: str
    version: str
    at_ms: int
    removal_ms: int
    usage: Usage
    forced: bool = False

    @property
    def tool(self) -> str:
        return f"{self.address}@{self.version}"

    def facts(self) -> Json:
        return {
            "event": self.event,
            "tool": self.tool,
            "attempts7d": self.usage.week,
            "attempts24h": self.usage.day,
            "removalDate": iso(self.removal_ms),
            "forced": self.forced,
        }


def deprecate(
    address: str,
    version: str,
    *,
    by: str,
    successor: str | None = None,
    migration_guide: str | None = None,
    grace_days: int = GRACE_DAYS,
    anyway: bool = False,
) -> Unit[Notice]:
    """Unit that announces the end of a version: it runs until the removal date, and every result says so.

    The successor is a registered tool, or with `anyway` one that does not exist yet.
    """
    _require_sense(address, version, successor, grace_days)
    guide = None if migration_guide is None else _uri(migration_guide)

    def unit(transaction: Transaction) -> Notice:
        _require_move(transaction, address, version, "deprecated")
        if not anyway:
            _require_registered(transaction, address, version, successor)
        now_ms = transaction.now_ms
        notice = Notice(now_ms, now_ms + grace_days * _DAY_MS, successor, guide)
        _set(transaction, address, version, "deprecated", notice)
        _record(transaction, address, version, now_ms, event="tool.deprecated", by=by, **notice.document())
        return notice

    return unit


def amend(
    address: str,
    version: str,
    *,
    by: str,
    successor: str | None = None,
    migration_guide: str | None = None,
    grace_days: int | None = None,
    anyway: bool = False,
) -> Unit[Notice]:
    """Unit that corrects the notice of a deprecated version. Omitted parts stay; days count from now."""
    _require_sense(address, version, successor, grace_days or 0)
    guide = None if migration_guide is None else _uri(migration_guide)

    def unit(transaction: Transaction) -> Notice:
        state, current = _look(transaction, address, version)
        if state != "deprecated" or current is None:
            raise Failure("E3103", f"{address}@{version} is {state}; only what a deprecated version says is corrected")
        if not anyway:
            _require_registered(transaction, address, version, successor)
        now_ms = transaction.now_ms
        removal_ms = current.removal_ms if grace_days is None else now_ms + grace_days * _DAY_MS
        notice = Notice(
            current.deprecated_ms, removal_ms, successor or current.successor, guide or current.migration_guide
        )
        _set(transaction, address, version, "deprecated", notice)
        _record(transaction, address, version, now_ms, event="tool.deprecation_amended", by=by, **notice.document())
        return notice

    return unit


def _require_sense(address: str, version: str, successor: str | None, grace_days: int) -> None:
    if grace_days < 0:
        raise Failure("E3004", f"a grace period of {grace_days} days lies in the past")
    if successor in (version, f"{address}@{version}"):
        raise Failure("E3004", f"{address}@{version} cannot be its own successor")


def _require_registered(transaction: Transaction, address: str, version: str, successor: str | None) -> None:
    """Refuse (E3004) a successor that nobody could call, or that is the retired version itself."""
    if successor is None:
        return
    name, at, spec = successor.partition("@")
    address_ = tools.aliased(transaction, name) or name
    others = tools.callable_versions(transaction, address_, but=(address, version))
    if not (any(_admits(spec, one) for one in others) if at else others):
        words = "is not registered beside it; name a tool in full, as in demo.post or demo.post@2.0.0"
        raise Failure("E3004", f"the successor `{successor}` {words}, or say that it is meant anyway")


def move(address: str, version: str, to: Literal["sunset", "removed"], *, by: str) -> Unit[None]:
    """Unit that moves a deprecated version one state further by an operator's decision, whatever its date and usage."""

    def unit(transaction: Transaction) -> None:
        notice = _require_move(transaction, address, version, to)
        _set(transaction, address, version, to, notice)
        _record(transaction, address, version, transaction.now_ms, event=f"tool.{to}", by=by)

    return unit


async def sweep(
    journal: Store, now_ms: int, *, by: str, force: bool = False, extend_days: int = EXTEND_DAYS
) -> list[Milestone]:
    """Report on deprecated versions and retire those that are due. Returns the recorded events.

    A version that is still in use is not removed: its removal date moves by `extend_days`, or with `force` it is
    removed anyway.
    """
    versions = await journal.read(tools.deprecated)
    if not versions:
        return []
    tally = await _count(journal, now_ms)
    happened: list[Milestone] = []
    for address, version in versions:
        judge = _Judge(address, version, now_ms, by, tally, None if force else extend_days)
        happened.extend(await journal.commit(judge.unit))
    return happened


async def usage(journal: Store, address: str, version: str, now_ms: int) -> Usage:
    """Return how often a version was requested, according to the journal."""
    tally = await _count(journal, now_ms)
    aliases = await journal.read(lambda reader: tools.aliases(reader, address))
    return tally.of(_names(address, aliases), version)


# Judging one version


@dataclass(frozen=True, slots=True)
class _Judge:
    """Decides, inside one write, what happens to a version. `extend_days` is None if removal is forced."""

    address: str
    version: str
    now_ms: int
    by: str
    tally: _Tally
    extend_days: int | None

    def unit(self, transaction: Transaction) -> list[Milestone]:
        # Checked again inside the write: another process may have swept since.
        state, notice = _look(transaction, self.address, self.version)
        if notice is None or state not in ("deprecated", "sunset"):
            return []
        if self.now_ms >= notice.removal_ms:
            return self._retire(transaction, state, notice)
        return self._report(transaction, notice) if state == "deprecated" else []

    def _report(self, transaction: Transaction, notice: Notice) -> list[Milestone]:
        name = f"deprecation_report:{self.address}@{self.version}"
        last = facts.get(transaction, name)
        since = notice.deprecated_ms if last is None else int(last)
        if self.now_ms < since + REPORT_DAYS * _DAY_MS:
            return []
        facts.put(transaction, name, str(self.now_ms))
        used = self._usage(transaction)
        event: Happening = "DEPRECATION_MIGRATION_PROGRESS" if used.week else "DEPRECATION_MIGRATION_COMPLETE"
        return [self._milestone(transaction, event, notice, used)]

    def _retire(self, transaction: Transaction, state: LifecycleState, notice: Notice) -> list[Milestone]:
        milestones: list[Milestone] = []
        used = self._usage(transaction)
        if state == "deprecated":
            _set(transaction, self.address, self.version, "sunset", notice)
            _record(transaction, self.address, self.version, self.now_ms, event="tool.sunset", by=self.by)
        if used.day:
            if self.extend_days is not None:
                notice = replace(notice, removal_ms=self.now_ms + self.extend_days * _DAY_MS)
                _set(transaction, self.address, self.version, "sunset", notice)
                return [self._milestone(transaction, "DEPRECATION_REMOVAL_BLOCKED", notice, used)]
            milestones.append(self._milestone(transaction, "DEPRECATION_REMOVAL_BLOCKED", notice, used))
        # INVARIANT: a version in use is removed only by force.
        _set(transaction, self.address, self.version, "removed", notice)
        milestones.append(self._milestone(transaction, "TOOL_VERSION_REMOVED", notice, used, forced=used.day > 0))
        return milestones

    def _usage(self, transaction: Transaction) -> Usage:
        """Return the usage that was counted, plus what has been journalled since."""
        tally = self.tally.with_more(ledger.attempts_after(transaction, self.tally.head))
        return tally.of(_names(self.address, tools.aliases(transaction, self.address)), self.version)

    def _milestone(
        self, transaction: Transaction, event: Happening, notice: Notice, used: Usage, *, forced: bool = False
    ) -> Milestone:
        milestone = Milestone(
            event=event, address=self.address, version=self.version, at_ms=self.now_ms, removal_ms=notice.removal_ms,
            usage=used, forced=forced,
        )  # fmt: skip
        _record(transaction, self.address, self.version, self.now_ms, **milestone.facts(), by=self.by)
        return milestone


# Counting


class _Attempt(NamedTuple):
    """The tool that a closing record names. No version: the call was refused before it had one."""

    tool: str
    version: str | None
    error: str | None
    spec: str | None
    today: bool

    def meant(self, names: frozenset[str], version: str) -> bool:
        if self.tool not in names:
            return False
        if self.version is not None:
            return self.version == version
        return self.error in _GONE and (self.spec is None or _admits(self.spec, version))


@dataclass(frozen=True, slots=True)
class _Tally:
    """Attempts of seven days, counted up to one record of the journal."""

    head: int
    day_start: str
    attempts: Counter[_Attempt]

    def with_more(self, attempts: Iterable[ledger.Attempt]) -> _Tally:
        more = Counter(
            _Attempt(one.tool, one.version, one.error, one.spec, today=one.call >= self.day_start) for one in attempts
        )
        return _Tally(self.head, self.day_start, self.attempts + more)

    def of(self, names: frozenset[str], version: str) -> Usage:
        meant = [(each, count) for each, count in self.attempts.items() if each.meant(names, version)]
        return Usage(week=sum(n for _, n in meant), day=sum(n for each, n in meant if each.today))


async def _count(journal: Store, now_ms: int) -> _Tally:
    # Everything handed to the journal before this is on disk when it returns.
    head = await journal.commit(lambda transaction: transaction.head[0])
    tally = _Tally(head, _first_call(now_ms - _DAY_MS), Counter())
    after = _first_call(now_ms - 7 * _DAY_MS)
    while True:
        page = await journal.read(partial(ledger.attempts_of_calls, first=after, through=head, most=_PAGE))
        tally = tally.with_more(page)
        if len(page) < _PAGE:
            return tally
        after = page[-1].call + "\x01"  # behind this call; PostgreSQL takes no NUL character
        await asyncio.sleep(0)


def _first_call(at_ms: int) -> str:
    return new_id(max(at_ms, 0), bytes(10))


def _names(address: str, aliases: Iterable[str]) -> frozenset[str]:
    """Return every name a caller may have used: a refused call is on record under the name it used."""
    full = {address, *aliases}
    return frozenset(full | {name.rpartition(".")[2] for name in full})


def _admits(spec: str, version: str) -> bool:
    try:
        return resolve(spec, (version,)) == version
    except Failure:
        return False


# The store


_ORDER = (*NEXT, "removed")


def _look(transaction: Transaction, address: str, version: str) -> tuple[LifecycleState, Notice | None]:
    """Return state and notice of a version; E3101 or E3102 if there is none."""
    row = tools.lifecycle(transaction, address, version)
    if row is not None:
        return row.state, None if row.notice is None else Notice(**orjson.loads(row.notice))
    if tools.exists(transaction, address):
        raise Failure("E3102", f"{address} has no version `{version}`")
    raise Failure("E3101", f"no tool named `{address}`")


def _require_move(transaction: Transaction, address: str, version: str, to: LifecycleState) -> Notice | None:
    """Return the current notice; E3103 unless `to` is the very next state."""
    state, notice = _look(transaction, address, version)
    if NEXT.get(state) != to:
        order = ", ".join(_ORDER)
        raise Failure("E3103", f"{address}@{version} is {state} and cannot become {to}; versions only go {order}")
    return notice


def _set(transaction: Transaction, address: str, version: str, state: LifecycleState, notice: Notice | None) -> None:
    text = None if notice is None else orjson.dumps(notice).decode()
    tools.set_lifecycle(transaction, address, version, state, text)
    bump_epoch(transaction, (address,))


def _record(transaction: Transaction, address: str, version: str, at_ms: int, **facts: Any) -> None:
    ref = f"{address}@{version}"
    transaction.append("registry", ref, records.plain("registry", ref, at_ms, **{"tool": ref, **facts}))


def _uri(text: str) -> str:
    # Housekeeping runs in every call, and finds no guide to check.
    import pydantic

    from interlock.contract.manifest import Uri

    try:
        return pydantic.TypeAdapter[str](Uri).validate_python(text)
    except pydantic.ValidationError:
        raise Failure("E3004", f"`{text}` is not a URI; callers are to find the migration guide there") from None
