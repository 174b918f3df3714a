"""The command by which a reviewer agrees in advance to calls like one that waits.

It is offered in the message that says that a person is asked. Its bounds fit the call and what is like it: paths in the
same directory, amounts up to this one, and everything else as it is. The reviewer may edit it before typing it.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import orjson

from interlock.contract.argument_bounds import is_open, written

if TYPE_CHECKING:
    from interlock.approvals.ticket import Ticket

USES, SPAN = 10, "1d"
# Characters of a text that can be a bound; a longer one is content, which is left open.
_LONGEST_BOUND = 80
_SIGNS = frozenset("<>= \t")


def advance_command(ticket: Ticket, caller: str | None = None) -> str | None:
    """Return the command, or None if no bounds fit: an undo, or a call whose arguments are all content or private."""
    if ticket.operation != "invoke":
        return None
    words = ["interlock", "approvals", "grant", ticket.tool, "--caller", caller or ticket.requester]
    bound = not ticket.params
    for name, value in ticket.params.items():
        option, pattern = _bounds(name, value)
        if option is None:
            return None
        bound = bound or not is_open(pattern)
        words += [option, f"{name}<={pattern}" if option == "--where" else f"{name}={pattern}"]
    return shlex.join([*words, "--uses", str(USES), "--expires", SPAN]) if bound else None


def _bounds(name: str, value: Any) -> tuple[str | None, str]:
    """Return the option that bounds an argument, and the bound; no option if none can be written."""
    if type(value) in (int, float) and not _SIGNS.intersection(name):
        return "--where", orjson.dumps(value).decode()
    if not isinstance(value, str):
        return "--arg", orjson.dumps(value).decode()
    if len(value) > _LONGEST_BOUND or not value.isprintable() or "REDACTED" in value or "…" in value:
        return "--arg", "*"
    if set("*?") & set(value):
        return None, ""  # these match anything in a pattern
    directory = value.rpartition("/")[0]
    return "--arg", f"{directory}/*" if value.startswith("/") and directory else written(value)
