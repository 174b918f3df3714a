"""Canonical JSON, one byte form per value, and what is derived from it: digests and idempotency keys.

Canonical JSON here is UTF-8 without insignificant whitespace, keys sorted by code point, strings in Unicode NFC, and
numbers in one spelling: a float that is a whole number is written as that whole number (`1.0`, `1e0` and `1` are one
value). The compiled walk (`_walk.c`) writes plain data. Without it, orjson does nearly all of the work in one pass, and
the slow path runs only if the output shows that something is left to do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Callable
from typing import Any, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.nfc import is_nfc, nfc

try:
    from interlock.data import _walk as compiled
except ImportError:  # installed without a compiler
    compiled = None  # pyright: ignore[reportAssignmentType] - None is what stands for that

_SORTED = orjson.OPT_SORT_KEYS


def nothing_plain(_: Any) -> None:
    """Stands for the compiled walk where nothing was compiled."""


# Returns the canonical bytes of plain data, which is fast; None if the data needs closer inspection.
plain_form: Callable[[Any], bytes | None] = nothing_plain if compiled is None else compiled.canonical


def canonical(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value. Refuses values that JSON cannot represent (E3004)."""
    return plain_form(value) or interpreted(value)


def interpreted(value: Any) -> bytes:
    """Return the canonical bytes by orjson and Python: for data that is not plain, and if nothing was compiled."""
    try:
        # Without the PASSTHROUGH options orjson would silently convert dataclasses, dates and str subclasses to JSON.
        encoded = orjson.dumps(value, None, _STRICT)
    except TypeError:
        return _slow(value)
    if not encoded.isascii() and not is_nfc(encoded.decode()):
        return _slow(value)
    # A null may stand for a NaN, and an exponent may hide a whole number: then every value is inspected. (orjson writes
    # large numbers as 1e+16, and searching a plus sign is a hundred times faster than searching an exponent. Searching
    # a byte by its number is several times faster than as a text of length one, and a word faster from the end.)
    if encoded.rfind(b"null") >= 0 or ((_PLUS_SIGN in encoded or not _PLUS) and _EXPONENT(encoded)):
        return _slow(value) if len(encoded) > _LARGE else _dump(_whole(value))
    if _POINT in encoded:
        return _without_fractions(encoded) or _dump(_whole(value))
    return encoded


def _without_fractions(encoded: bytes) -> bytes | None:
    """Remove `.0` from every number of the text; None if only the values themselves can tell.

    `.0` before a comma or bracket belongs to a number exactly when it stands outside a string. A name's last letter, a
    quote and a colon before the digits show that at once; elsewhere, an even number of quotes before it does. Escapes
    would invalidate both tests, and minus zero needs separate treatment.
    """
    pieces: list[bytes] = []
    done = counted = quotes = 0
    looked = False
    for match in _FRACTION(encoded):
        at = match.start()
        looked = True
        if _MEMBER(encoded, max(at - 20, 0), at) is None:
            quotes += encoded.count(b'"', counted, at)
            counted = at
            if quotes % 2:
                continue
        pieces.append(encoded[done:at])
        done = at + 2
        if encoded[at - 2 : at] == b"-0":
            return None
    if not looked:
        return encoded
    return None if _BACKSLASH in encoded else b"".join(pieces) + encoded[done:]


_FRACTION = expression(rb"\.0(?=[,}\]]|\Z)").finditer
_MEMBER = expression(rb'[0-9A-Za-z_]":-?[0-9]+\Z').search


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value, None, _STRICT)
    except TypeError:
        return _slow(value)


def _whole(value: Any) -> Any:
    """Convert whole floats to integers. Not split into functions, because it may visit every value of a call."""
    kind = value.__class__
    if kind is dict:
        copied: Any = None
        for name, item in value.items():
            kind = item.__class__
            if kind is float:
                new: Any = _whole_number(item)
            elif kind is dict or kind is list or kind is tuple:
                new = _whole(item)
            else:
                continue
            if new is not item:
                copied = dict(value) if copied is None else copied
                copied[name] = new
        return value if copied is None else copied
    if kind is list or kind is tuple:
        return [_whole(item) if item.__class__ in _MAY_CHANGE else item for item in value]
    return _whole_number(value) if kind is float else value


def _whole_number(number: float) -> int | float:
    if not math.isfinite(number):
        raise Failure("E3004", f"`{number}` is not a JSON number")
    return int(number) if number.is_integer() else number


_MAY_CHANGE = frozenset({float, dict, list, tuple})
_EXPONENT = expression(rb"e[+1-9]").search
_PLUS = b"+" in orjson.dumps(1e16)
_PLUS_SIGN, _POINT, _BACKSLASH = ord("+"), ord("."), ord("\\")
_LARGE = 10_000_000
_STRICT = _SORTED | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def _slow(value: Any) -> bytes:
    plain = _normal(value, 0)
    try:
        return orjson.dumps(plain, None, _STRICT)
    except TypeError:  # whole numbers beyond 64 bits, or a lone surrogate
        pass
    try:
        return _piece_by_piece(plain)
    except TypeError:
        raise Failure("E3004", "text must be valid Unicode; a lone surrogate was found") from None
    except ValueError:
        raise Failure("E3004", "a number is too long to be written") from None


def _piece_by_piece(value: Any) -> bytes:
    """Write normalised JSON data like orjson, but with whole numbers of any size: one value, one form."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return b"{%s}" % b",".join(b"%s:%s" % (orjson.dumps(n), _piece_by_piece(members[n])) for n in sorted(members))
    if isinstance(value, list):
        return b"[%s]" % b",".join(map(_piece_by_piece, cast("list[Any]", value)))
    return b"%d" % value if value.__class__ is int else orjson.dumps(value)


def _normal(value: Any, depth: int) -> Any:
    """Normalise numbers and text to their one spelling; refuses anything that is not JSON."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Failure("E3004", f"`{value}` is not a JSON number")
        return int(value) if value.is_integer() else float(value)
    if isinstance(value, str):
        return nfc(value)
    if depth > 200:
        raise Failure("E3004", "values are nested more than 200 deep")
    if isinstance(value, list | tuple):
        return [_normal(item, depth + 1) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return _normal_object(cast("dict[Any, Any]", value), depth)
    raise Failure("E3004", f"a value of type {type(value).__name__} is not JSON")


def _normal_object(value: dict[Any, Any], depth: int) -> dict[str, Any]:
    normal: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise Failure("E3004", "object keys must be text")
        name = nfc(key)
        if name in normal:
            raise Failure("E3004", f"the key `{name}` appears twice once its Unicode form is normalised")
        normal[name] = _normal(item, depth + 1)
    return normal


_NINES = bytes.maketrans(b"0123456789", b"9" * 10)
_DIGITS_OF_64_BITS = 19
_RUN = b"9" * _DIGITS_OF_64_BITS
_WINDOW = 65_536


def may_hold_long_number(text: bytes) -> bool:
    """Whether JSON text has a run of digits that could be a whole number beyond 64 bits, which orjson would round."""
    if len(text) <= _WINDOW:
        return _RUN in text.translate(_NINES)
    return longest_run(text, _DIGITS_OF_64_BITS) >= _DIGITS_OF_64_BITS


def longest_run(text: bytes | bytearray, most: int) -> int:
    """Find the longest run of digits in a text. May stop at `most`, and may return 0 for any run that is shorter."""
    if compiled is not None:
        return compiled.digits(text)
    # Searching a run of one digit is many times faster than searching a run of any digits. A call into C blocks all
    # other threads, so a long text is searched in windows.
    run = b"9" * most
    found = any(
        run in text[start : start + _WINDOW + most - 1].translate(_NINES) for start in range(0, len(text), _WINDOW)
    )
    return most if found else 0


def encode(value: Any) -> bytes:
    """Encode a value as JSON, unchanged: no sorting, no normalising, whole numbers of any size."""
    try:
        return orjson.dumps(value)
    except TypeError:
        pass
    try:
        # One call of json.dumps would block all other threads many times as long as orjson does.
        return orjson.dumps(_spelled(value))
    except (TypeError, RecursionError):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _spelled(value: Any) -> Any:
    """Replace whole numbers beyond 64 bits by fragments that orjson can write."""
    kind = value.__class__
    if kind is int:
        return value if _LEAST <= value <= _MOST else orjson.Fragment(b"%d" % value)
    if kind is float and not math.isfinite(value):
        raise ValueError("Out of range float values are not JSON compliant")
    if kind is dict:
        return {name: _spelled(item) for name, item in value.items()}
    return [_spelled(item) for item in value] if kind is list or kind is tuple else value


_LEAST, _MOST = -(2**63), 2**64 - 1


def decode(text: bytes) -> Any:
    """Decode JSON text that `encode` wrote, exactly."""
    return json.loads(text) if may_hold_long_number(text) else orjson.loads(text)


def private_copy(value: Any) -> Any:
    """Deep-copy JSON data with every text and number unchanged, so that nothing is shared."""
    copy = None if compiled is None else compiled.copied(value)
    return decode(encode(value)) if copy is None else copy


def parse(raw: bytes | str) -> Any:
    """Parse JSON text; invalid JSON raises E3004 and nothing else."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Failure("E3004", f"not valid JSON: {error.msg} at character {error.pos}") from None


# `hashlib.sha256` looks the algorithm up for every hash, which takes longer than to hash a short input. Where each read
# computes one, it is a copy of this, which needs no look-up.
NO_HASH = hashlib.sha256()


def digest(value: Any) -> str:
    """SHA-256 of the canonical form, in hex."""
    return hashlib.sha256(plain_form(value) or interpreted(value)).hexdigest()


def sealed_digest(*parts: str) -> bytes:
    """SHA-256 over length-delimited parts, so that no two different tuples share an encoding."""
    return hashlib.sha256(_delimited(parts)).digest()


def key_scope(
    *,
    tenant: str,
    caller: str,
    session: str,
    tool: str,
    operation: str,
    key: str | None,
    parent: str | None,
    given: str,
    call: str | None = None,
) -> bytes:
    """Compute the row of a call's idempotency record: by its key, for an undo by the call it undoes, without a key by
    the id of the `call`, if that is given, or else by its input.

    A caller cannot reach another caller's row, whatever key it guesses.
    """
    name = f"{tool}#{operation}"
    if operation == "compensate":
        # One undo per undone call, whatever key and session it is requested with, as long as it can be undone.
        session, key = "", f"{parent}"
    elif not key:
        by, key = ("input", given) if call is None else ("call", call)
        name = f"{name}#{by}"
    return hashlib.sha256(_delimited((tenant, caller, session, name, key))).digest()


def derive_key(secret: bytes, *, session_id: str, tool_id: str, step_id: str, params: Any) -> str:
    """Derive the idempotency key of one step; it is the same after a restart.

    HMAC-SHA256 over length-delimited parts and the canonical params, under a tenant's secret. Callers derive keys;
    nothing on the server side calls this.
    """
    message = _delimited((session_id, tool_id, step_id)) + canonical(params)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def tenant_secret(home: bytes, tenant: str) -> bytes:
    """Derive the secret of one tenant from that of the home; the operators' own tenant (`local`) uses the home's
    itself.

    A tenant's secret reveals neither the home's nor another tenant's.
    """
    if tenant == "local":
        return home
    return hmac.new(home, b"tenant:" + _delimited((tenant,)), hashlib.sha256).digest()


def purpose_secret(home: bytes, purpose: str) -> bytes:
    """Derive a key for something else than idempotency keys. It reveals neither the home's secret nor a tenant's."""
    return hmac.new(home, b"purpose:" + _delimited((purpose,)), hashlib.sha256).digest()


def _delimited(parts: tuple[str, ...]) -> bytes:
    text = "".join([f"{len(part)}:{part}" for part in parts])
    if text.isascii():
        return text.encode()
    try:
        return b"".join([b"%d:%s" % (len(data), data) for data in [part.encode() for part in parts]])
    except UnicodeEncodeError:
        raise Failure("E3004", "text must be valid Unicode; a lone surrogate was found") from None
