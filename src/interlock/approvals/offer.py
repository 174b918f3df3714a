"""The command by which a reviewer agrees in advance to calls like one that waits.

It is offered in the message that says that a person is asked. Its bounds fit the call and what is like it: paths in the
same directory, amounts up to this one, and everything else as it is. What is too long for a bound is left open, and the
command says so. The reviewer may edit it before typing it.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, cast

from interlock.contract.argument_bounds import written
from interlock.data.canonical import encode

if TYPE_CHECKING:
    from interlock.approvals.ticket import Ticket

USES, SPAN = 10, "1d"
# Characters of a text, or of another value as JSON, that can be a bound; a longer one is content, which is left open.
_LONGEST_BOUND = 80
_SIGNS = frozenset("<>= \t")
_OPEN_TEXT = "*"


def advance_command(ticket: Ticket, caller: str | None = None) -> str | None:
    """Return the command, or None if no bounds fit: an undo, or a call whose arguments are all content or private."""
    if ticket.operation != "invoke":
        return None
    words = ["interlock", "approvals", "grant", ticket.tool, "--caller", caller or ticket.requester]
    bound = not ticket.params
    for name, value in ticket.params.items():
        found = None if "=" in name else _bound(name, value)
        if found is None:
            return None
        option, word = found
        bound = bound or not (option == "--any-value" or word == f"{name}={_OPEN_TEXT}")
        words += found
    return shlex.join([*words, "--uses", str(USES), "--expires", SPAN]) if bound else None


def _bound(name: str, value: Any) -> tuple[str, str] | None:
    """Return the option that bounds an argument, and its word; None if none can be written."""
    if type(value) in (int, float) and not _SIGNS.intersection(name):
        return "--where", f"{name}<={encode(value).decode()}"
    if isinstance(value, str):
        word = _text(value)
        return None if word is None else ("--arg", f"{name}={word}")
    if isinstance(value, list) and (directory := _directory(cast("list[Any]", value))) is not None:
        return "--each", f"{name}={directory}/*"
    word = encode(value).decode()
    if len(word) > _LONGEST_BOUND or _is_cut(word):
        return "--any-value", name
    return "--arg", f"{name}={word}"


def _is_cut(text: str) -> bool:
    """Whether something that the call has is not in a text: it is private, or was too long to be shown."""
    return "REDACTED" in text or "…" in text


def _text(value: str) -> str | None:
    """The pattern of a text."""
    if len(value) > _LONGEST_BOUND or not value.isprintable() or _is_cut(value):
        return _OPEN_TEXT
    if set("*?") & set(value):
        return None  # these match anything in a pattern
    directory = _directory([value])
    return written(value) if directory is None else f"{directory}/*"


def _directory(values: list[Any]) -> str | None:
    """The directory that all of these are absolute paths in; None if they are none, or not plain."""
    places = {value.rpartition("/")[0] if isinstance(value, str) and _is_plain(value) else "" for value in values}
    return places.pop() or None if len(places) == 1 else None


def _is_plain(path: str) -> bool:
    """Whether a text is an absolute path that its directory, as a pattern, covers."""
    steps = path.split("/")
    plain = path.isprintable() and len(path) <= _LONGEST_BOUND and not set("*?\\") & set(path) and not _is_cut(path)
    return path.startswith("/") and plain and ".." not in steps and "." not in steps
