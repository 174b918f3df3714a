"""Refused declarations: raised one by one, or collected, so that all of a file are reported at once."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from typing import Any

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Fault


@dataclass(frozen=True, slots=True)
class DeclarationRefusal:
    """A declaration that was refused: the name of its function, the place, and every fault in words.

    `stand_in` is the object that the module has instead of the tool. `pointers` say for each fault which option it is
    about, where that is known.
    """

    name: str
    file: str
    line: int
    faults: tuple[str, ...]
    stand_in: object
    pointers: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Any, faults: Sequence[Fault], stand_in: object) -> DeclarationRefusal:
        file, line = place_of(function)
        name = getattr(function, "__name__", None) or repr(function)
        words, pointers = (tuple(getattr(fault, part) for fault in faults) for part in ("message", "pointer"))
        return cls(name, file, line, words, stand_in, pointers)

    def failure(self) -> Failure:
        """The failure that its declaration would have raised alone."""
        faults = [
            {"pointer": pointer, "message": words} for pointer, words in zip(self.pointers, self.faults, strict=True)
        ]
        words = f"`{self.name}` cannot be declared as a tool yet: {'; '.join(self.faults)}"
        return Failure("E3105", words, details={"faults": faults})


def place_of(function: Any) -> tuple[str, int]:
    """The file and the line in which a function is declared; an empty name and 0 for anything else."""
    code = getattr(function, "__code__", None)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


_COLLECTED: ContextVar[list[DeclarationRefusal] | None] = ContextVar("collected refusals", default=None)


@contextlib.contextmanager
def collecting() -> Generator[list[DeclarationRefusal]]:
    """Collect the refusals of declarations in this context, instead of raising the first one."""
    found: list[DeclarationRefusal] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def collected(refusal: DeclarationRefusal) -> bool:
    """Keep a refusal if they are being collected. Otherwise its declaration raises it."""
    found = _COLLECTED.get()
    if found is not None:
        found.append(refusal)
    return found is not None
