"""The types that the checks of `interlock doctor` share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Literal

from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.port import Reader

Status = Literal["good", "attention", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    what: str
    advice: str = ""


# Looks at one part of a data directory or of the machine.
Check = Callable[["Home"], Iterator[Finding]]


@contextlib.contextmanager
def if_usable(home: Home) -> Generator[Reader | None]:
    """The database, or None if it is missing or cannot be used. The check of the journal reports that, once."""
    from interlock.core.errors import Failure
    from interlock.store.inspection import opened

    with contextlib.ExitStack() as stack:
        try:
            reader = None if home.new else stack.enter_context(opened(home))
        except Failure:
            reader = None
        yield reader
