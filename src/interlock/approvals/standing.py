"""Standing approvals: a person agrees in advance, within mandatory bounds.

A standing approval names one tool and a range of its versions, one caller or one group of callers of one tenant, a
pattern for every argument, a number of uses and an end. A matching call uses it once, in the transaction that makes its
intent durable, and cites its id. A call that does not match requests a ticket like any other.

Nobody agrees in advance to their own calls, unless they have stated that they are alone on the machine. When they take
that statement back, such approvals end.

What a pattern can say is in `contract/argument_bounds.py`. A path, URL or host is compared with its pattern in normal
form, so that `/tmp/x/*` does not cover `/tmp/x/../../etc`; one without a normal form is not covered.

As with tickets, a row alone is not trusted: its last record in the journal must say that it was granted or used, with
these bounds and this number of uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.approvals.reviewers import instead_of, is_alone, is_person, signature, speaks_for
from interlock.contract.argument_bounds import is_open, matches
from interlock.contract.versions import resolve
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import decode, digest, encode
from interlock.store import records
from interlock.store import standing as stored
from interlock.store.standing import StandingRow

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.store.port import Reader, Transaction, Unit

# Converts patterns and arguments to the form in which they are compared; None if an argument has no such form.
Normal = Callable[[Mapping[str, Any], Mapping[str, Any]], "tuple[Mapping[str, Any], Mapping[str, Any]] | None"]

# How the caller of an approval begins that is for all members of a group, which share its uses.
GROUP = "group:"

MAX_USES = 10_000
MAX_DAYS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One standing approval."""

    id: str
    tenant: str
    tool: str
    versions: str
    arguments: Mapping[str, Any]
    caller: str
    uses: int
    expires_ms: int
    granted_by: str
    used: int = 0
    created_ms: int = 0
    revoked_ms: int | None = None

    def is_for(self, caller: Caller) -> bool:
        """Whether this approval is for a caller: by its id, or as a member of a group."""
        if not self.caller.startswith(GROUP):
            return self.caller == caller.acting
        # INVARIANT: nobody agrees in advance to their own calls, nor to those of their agents, as one of a group.
        return self.caller.removeprefix(GROUP) in caller.groups and self.granted_by not in (caller.id, caller.acting)

    def fits(
        self, caller: Caller, tool: str, version: str, arguments: Mapping[str, Any], now_ms: int, normal: Normal
    ) -> bool:
        """Whether this approval covers a call."""
        if self.revoked_ms is not None or self.used >= self.uses or now_ms >= self.expires_ms:
            return False
        if not self.is_for(caller) or self.tool != tool or not _in_range(version, self.versions):
            return False
        # INVARIANT: an argument without a pattern is not covered, nor is a call that omits an argument with a binding
        # pattern.
        binding = {name for name, pattern in self.arguments.items() if not is_open(pattern)}
        if not binding <= arguments.keys() <= self.arguments.keys():
            return False
        compared = normal(self.arguments, arguments)
        if compared is None:
            return False
        patterns, values = compared
        return all(matches(patterns[name], value) for name, value in values.items())

    def document(self) -> Json:
        return {
            "id": self.id,
            "tool": self.tool,
            "versions": self.versions,
            "arguments": dict(self.arguments),
            "caller": self.caller,
            "tenant": self.tenant,
            "uses": self.uses,
            "used": self.used,
            "expiresAt": iso(self.expires_ms),
            "grantedBy": self.granted_by,
            "revoked": self.revoked_ms is not None,
        }


def _in_range(version: str, versions: str) -> bool:
    try:
        return resolve(versions, [version]) == version
    except Failure:
        return False


def grant(
    wish: Standing,
    by: Caller,
    approvers: frozenset[str],
    now_ms: int,
    uses: Sequence[Callable[[Transaction], None]] = (),
) -> Unit[Standing]:
    """Unit that grants a standing approval; refuses approvers without the right, and missing bounds.

    `uses` are run in the same transaction to use up what granting consumes; one that raises has written nothing.
    """
    if not is_person(by):
        raise Failure("E3206", "only a person can agree in advance; an agent never can")
    if not speaks_for(by, wish.tenant):
        raise Failure("E3206", f"{wish.caller} belongs to {wish.tenant}, and {by.id} does not")
    if not by.groups & approvers:
        raise Failure("E3206", f"{by.id} does not approve calls of {wish.tool}; {' or '.join(sorted(approvers))} do")
    for fault in _unbounded(wish, now_ms):
        raise Failure("E3004", f"a standing approval needs its bounds: {fault}")

    def unit(transaction: Transaction) -> Standing:
        is_own = wish.caller in (by.id, by.acting)
        # INVARIANT: nobody agrees in advance to their own calls while somebody else could decide on them.
        if is_own and not is_alone(transaction, by):
            words = "nobody can agree in advance to their own calls while others can decide on them"
            raise Failure("E3206", words, resolution=instead_of(by))
        for use in uses:
            use(transaction)
        row = StandingRow(
            wish.id, wish.tenant, wish.tool, wish.versions, encode(dict(wish.arguments)).decode(), wish.caller,
            wish.uses, 0, transaction.now_ms, wish.expires_ms, by.acting, None,
        )  # fmt: skip
        stored.insert(transaction, row)
        alone = {"alone": True} if is_own else {}  # nobody else was there to agree, by their own statement
        _record(transaction, wish, "standing.granted", **signature(by), **alone, **_facts(wish))
        return _load(transaction, wish.id)

    return unit


def _unbounded(wish: Standing, now_ms: int) -> list[str]:
    """List the bounds that an approval lacks."""
    checks = {
        "one tool, without a wildcard": bool(wish.tool) and "*" not in wish.tool,
        "a range of versions": bool(wish.versions) and wish.versions != "*",
        "one caller or group, without a wildcard": wish.caller not in ("", GROUP) and "*" not in wish.caller,
        f"between 1 and {MAX_USES} uses": 1 <= wish.uses <= MAX_USES,
        f"an end within {MAX_DAYS} days": now_ms < wish.expires_ms <= now_ms + MAX_DAYS * 86_400_000,
        "a pattern that says more than anything goes": not wish.arguments
        or not all(is_open(pattern) for pattern in wish.arguments.values()),
    }
    return [what for what, holds in checks.items() if not holds]


def find(
    reader: Reader,
    *,
    caller: Caller,
    tool: str,
    version: str,
    arguments: Mapping[str, Any],
    now_ms: int,
    normal: Normal,
) -> Standing | None:
    """Find the standing approval that covers a call; of several, the one that ends first."""
    known = map(_standing, stored.of_tool(reader, tool, caller.tenant))
    fitting = (one for one in known if one.fits(caller, tool, version, arguments, now_ms, normal))
    return next(fitting, None)


def use(transaction: Transaction, standing: Standing, call: str) -> None:
    """Use an approval once, inside the transaction that makes the call's intent durable.

    E3410 if it is used up by now.
    """
    now = _load(transaction, standing.id)
    if now.used >= now.uses or now.expires_ms <= transaction.now_ms or now.revoked_ms is not None:
        raise Failure("E3410", f"the standing approval {standing.id} was used up meanwhile", retry_after_ms=10)
    last: Json = next(transaction.newest("approval", now.id), None) or {}
    # INVARIANT: a call is only approved by what the journal records as granted by a person, and no more often.
    if last.get("act") == "standing.revoked" or (last.get("bounds"), last.get("count")) != (_bounds(now), now.used):
        words = f"the journal does not say that anybody agreed to the standing approval {now.id} as it stands"
        raise Failure("E3209", f"{now.tool} was not approved: {words}; see interlock audit explain {now.id}")
    stored.add_use(transaction, now.id)
    _record(transaction, replace(now, used=now.used + 1), "standing.used", used_by=call)


def revoke(standing_id: str, by: Caller) -> Unit[Standing]:
    """Unit that ends a standing approval now."""

    def unit(transaction: Transaction) -> Standing:
        standing = _load(transaction, standing_id)
        if not is_person(by):
            raise Failure("E3206", "only a person can take an approval back")
        if not speaks_for(by, standing.tenant):
            raise Failure("E3702", f"no standing approval `{standing_id}`")
        if standing.revoked_ms is None:
            stored.revoke(transaction, standing.id, transaction.now_ms)
            _record(transaction, standing, "standing.revoked", **signature(by))
        return _load(transaction, standing.id)

    return unit


def end_own(transaction: Transaction, by: Caller) -> list[str]:
    """End the approvals by which a person agreed to their own calls, inside a transaction. Returns their ids."""
    own = [one for one in listing(transaction) if one.caller == one.granted_by == by.id and one.revoked_ms is None]
    for one in own:
        stored.revoke(transaction, one.id, transaction.now_ms)
        _record(transaction, one, "standing.revoked", **signature(by))
    return [one.id for one in own]


def listing(reader: Reader) -> list[Standing]:
    return list(map(_standing, stored.every(reader)))


def _load(transaction: Transaction, standing_id: str) -> Standing:
    row = stored.find(transaction, standing_id)
    if row is None:
        raise Failure("E3702", f"no standing approval `{standing_id}`")
    return _standing(row)


def _standing(row: StandingRow) -> Standing:
    return Standing(**{**row._asdict(), "arguments": decode(row.arguments.encode())})


def _facts(wish: Standing) -> Json:
    return {
        name: value for name, value in wish.document().items() if name not in ("id", "used", "revoked", "arguments")
    }


def _bounds(standing: Standing) -> str:
    """Digest of everything that bounds an approval, and of who granted it."""
    return digest({name: value for name, value in standing.document().items() if name not in ("used", "revoked")})


def _record(transaction: Transaction, standing: Standing, act: str, **facts: Any) -> None:
    document = {
        "mechanism": "standing",
        "tenant": standing.tenant,
        "bounds": _bounds(standing),
        "count": standing.used,
        **facts,
    }
    ref = standing.id
    transaction.append("approval", ref, records.plain("approval", ref, transaction.now_ms, act=act, **document))
