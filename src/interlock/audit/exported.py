"""Exports of the journal: writes them, and proves with the file alone that one is what the journal was at that time.

An export is the chain as it stands, a line for each record, byte for byte as it was hashed:

    {"seq":7,"hash":"…","record":{…}}

The first line also has the public key and, if retention removed what was before it, the signed hash `after` which the
chain continues; a line whose hash was signed has that signature. An export ends with a signed head: its maker signs
the record of having made it. Its end therefore cannot be cut off unnoticed, except back to an earlier signed head; an
auditor who knows a later one detects that. The holder of another key can sign another chain: trust begins with a public
key that was noted elsewhere.

INVARIANT: no byte of an export can be changed without a fault. Lines are of one form, with one way to write each value.
Only a signature before the last can be removed, whole: the last one covers all that it covered.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import orjson

from interlock.audit.chain import Follower
from interlock.audit.chain_verdict import ChainFault, Examination, records_words
from interlock.audit.signed_heads import Signatures
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.store import ledger
from interlock.store.last_head import SignedHead
from interlock.store.signing import Signer

if TYPE_CHECKING:
    from interlock.audit.chain_verdict import ChainVerdict
    from interlock.store.home import Home
    from interlock.store.port import Reader

_HASH, _MS = "[0-9a-f]{64}", "0|[1-9][0-9]{0,13}"  # times below END_MS


def _signed_by(name: str) -> str:
    """The pattern of a signature, in groups under a name."""
    return (
        rf'"at_ms":(?P<{name}_ms>{_MS}),"key_id":"(?P<{name}_key>[0-9a-f]{{16}})"'
        rf',"signature":"(?P<{name}>[0-9a-f]{{128}})"'
    )


_LINE = expression(
    (
        rf'\{{"seq":(?P<seq>[1-9][0-9]{{0,18}}),"hash":"(?P<hash>{_HASH})"'
        rf'(?:,"public_key":"(?P<public>{_HASH})")?'
        rf'(?:,"after":\{{"hash":"(?P<before>{_HASH})",{_signed_by("after")}\}})?'
        rf'(?:,"signed":\{{{_signed_by("signed")}\}})?'
        r',"record":(?P<body>.*)\}\n'
    ).encode(),
    re.DOTALL,
)
_PROGRESS_EVERY = 10_000
AT_A_TIME = 1000


def line_of(
    seq: int,
    digest: bytes,
    body: bytes,
    signed: SignedHead | None = None,
    *,
    public_key: bytes | None = None,
    after: SignedHead | None = None,
) -> bytes:
    """Format a record as a line of an export."""
    first = b"" if public_key is None else b',"public_key":"%b"' % public_key.hex().encode()
    if after is not None:
        first += b',"after":{"hash":"%b",%b}' % (after.hash.hex().encode(), _signature(after))
    head = b"" if signed is None else b',"signed":{%b}' % _signature(signed)
    return b'{"seq":%d,"hash":"%b"%b%b,"record":%b}\n' % (seq, digest.hex().encode(), first, head, body)


def _signature(head: SignedHead) -> bytes:
    form = b'"at_ms":%d,"key_id":"%b","signature":"%b"'
    return form % (head.at_ms, head.key_id.encode(), head.signature.hex().encode())


def export_lines(
    home: Home, upto: int, reader: Reader, *, last: SignedHead | None = None
) -> Generator[tuple[int, bytes]]:
    """The lines of an export up to a record, some at a time, with their number. `last` signs that record.

    E3410 where retention removes what is being read.
    """
    after: int | None = None
    while after != upto:
        rows = ledger.exported(reader, -1 if after is None else after, upto, AT_A_TIME)
        expected, first = (after or 0) + 1, rows[0].seq if rows else upto + 1
        if not rows or (after is not None and first != expected):
            words = f"records {expected} to {first - 1} were purged while the journal was exported"
            raise Failure("E3410", words, resolution="export the journal again")
        lines: list[bytes] = []
        for seq, digest, body, at_ms, key_id, signature in rows:
            signed = last if last is not None and seq == upto else None
            if at_ms is not None and key_id is not None and signature is not None:
                signed = SignedHead(seq, digest, at_ms, key_id, signature)
            if after is None and not lines:
                key = Signer(home.keys).public
                purged = ledger.segment_ending(reader, seq - 1)
                lines.append(line_of(seq, digest, body, signed, public_key=key, after=purged))
            else:
                lines.append(line_of(seq, digest, body, signed))
        yield len(lines), b"".join(lines)
        after = rows[-1].seq


def verify_export(
    lines: Iterable[bytes],
    *,
    public_key: bytes | None = None,
    known_head: tuple[int, bytes] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ChainVerdict:
    """Verify the chain of an export and report where it is broken; without `public_key`, by the key that it names."""
    began = time.monotonic()
    check = _Check(public_key, known_head)
    for number, line in enumerate(lines, 1):
        if not check.follow(line, first=number == 1):
            check.examined.in_records.note(check.examined.seq + 1, f"line {number} is not as an export has it")
            break
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number)
    check.end()
    return check.examined.verdict(time.monotonic() - began)


class _Check:
    """Checks the lines of an export in order."""

    def __init__(self, public_key: bytes | None, known_head: tuple[int, bytes] | None) -> None:
        self.examined = Examination(anchors_file=False)
        self._follower = Follower(self.examined)
        self._known = known_head
        self._named: bytes | None = None
        self._last_signed = 0
        self._signatures = Signatures(public_key, lambda: self._named)

    def follow(self, line: bytes, *, first: bool) -> bool:
        """Check one line; False for a malformed line, after which nothing can be checked."""
        match = _LINE.fullmatch(line)
        if match is None or (match["public"] is not None) != first or (match["before"] is not None and not first):
            return False
        seq, digest, examined = int(match["seq"]), bytes.fromhex(match["hash"].decode()), self.examined
        if first:
            self._named = bytes.fromhex(match["public"].decode())
            if self._signatures.given not in (None, self._named):
                examined.in_general.note(0, "it names another public key than the one given")
            self._begin(match, seq)
        self._follower.follow([(seq, *_names(match["body"]), match["body"], digest)])
        examined.records += 1
        if match["signed"] is not None:
            self._check_head(_head(match, "signed", seq, digest))
        if self._known is not None and self._known[0] == seq and self._known[1] != digest:
            examined.in_anchors.note(seq, "the record is not the one of the known head")
        return True

    def _begin(self, match: re.Match[bytes], seq: int) -> None:
        """Find where the chain begins: with the first record, or after what retention removed."""
        if match["before"] is None:
            return
        head, examined = _head(match, "after", seq - 1, bytes.fromhex(match["before"].decode())), self.examined
        if (wrong := self._signatures.fault("segment", head)) is not None:
            examined.in_segments.note(head.seq, f"the purged segment: {wrong}")
        examined.seq, examined.head, examined.purged_through = head.seq, head.hash, head.seq

    def _check_head(self, head: SignedHead) -> None:
        self.examined.anchors += 1
        self._last_signed = head.seq
        if (wrong := self._signatures.fault("head", head)) is not None:
            self.examined.in_anchors.note(head.seq, f"the signed head: {wrong}")
        else:
            self.examined.newest = head

    def end(self) -> None:
        """Check what only the end shows: that nothing is missing there."""
        examined = self.examined
        if not examined.records:
            examined.in_general.note(0, "there is no record in it")
        elif not examined.anchors:
            examined.in_general.note(0, "no head in it is signed, so anybody can have made it up")
        elif self._last_signed < examined.seq:
            examined.in_anchors.note(self._last_signed + 1, "it ends without a signed head: what came after is missing")
        if self._known is not None and self._known[0] > examined.seq:
            gone = f"{records_words(examined.seq + 1, self._known[0])} missing: the known head names the last"
            examined.in_anchors.faults.insert(0, ChainFault(examined.seq + 1, gone))


def _head(match: re.Match[bytes], name: str, seq: int, digest: bytes) -> SignedHead:
    at_ms, key_id = int(match[f"{name}_ms"]), match[f"{name}_key"].decode()
    return SignedHead(seq, digest, at_ms, key_id, bytes.fromhex(match[name].decode()))


def _names(body: bytes) -> tuple[Any, Any]:
    """Return kind and call of a record, as its row has them; None for invalid records."""
    try:
        record = orjson.loads(body)
        return bytearray(record["kind"], "utf-8"), bytearray(record["call"], "utf-8")
    except (orjson.JSONDecodeError, TypeError, KeyError, UnicodeEncodeError):
        return None, None
