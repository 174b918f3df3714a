"""Regular expressions that are compiled when they are first used.

Compiling one takes 0.2 ms, and a command loads 150 of which it uses a few. An expression that is refused is found by
the test that compiles them all.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def expression(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Like `re.compile`, but compiled on first use."""
    return cast("re.Pattern[AnyStr]", _Expression(text, flags))


class _Expression:
    """Has the attributes of a compiled expression, each from its first use on as an attribute of its own."""

    def __init__(self, text: Any, flags: int) -> None:
        self._made_of: tuple[Any, int] = text, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Python keeps the expressions that it compiled last, so that the next attribute is had at once.
        value = getattr(re.compile(*self._made_of), name)
        setattr(self, name, value)
        return value

    def __repr__(self) -> str:
        return repr(re.compile(*self._made_of))
