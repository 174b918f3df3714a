"""Parts of a large result: by JSON pointer, by JMESPath, by range, and within a number of tokens."""

from __future__ import annotations

from typing import Any, Final, cast

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.bounds import exactly
from interlock.data.schema import Json
from interlock.window.levels import outline, plain, truncated
from interlock.window.tokens import Counter

LONGEST: Final = 1000
FURTHEST: Final = 2**40
MOST_TOKENS: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a result: at a JSON pointer, then by an expression, then from one place to another.

    A range counts the items of a list or the characters of a text. `tokens` cuts what is left, so that it stays JSON.
    """

    at: str = ""
    query: str = ""
    start: int | None = None
    stop: int | None = None
    tokens: int | None = None


def asked(at: Any = "", query: Any = "", start: Any = None, stop: Any = None, tokens: Any = None) -> Part:
    """A part that somebody asked for over a wire; E3004 if what was sent cannot be one."""
    for name, text in (("at", at), ("query", query)):
        if not isinstance(text, str) or len(text) > LONGEST:
            raise Failure("E3004", f"`{name}` is a text of at most {LONGEST:,} characters")
    for name, place in (("start", start), ("stop", stop)):
        if place is not None and (place.__class__ is not int or not -FURTHEST <= place <= FURTHEST):
            raise Failure("E3004", f"`{name}` is a whole number; below 0, it counts from the end")
    if tokens is not None and (tokens.__class__ is not int or not 1 <= tokens <= MOST_TOKENS):
        raise Failure("E3004", f"`tokens` is a whole number from 1 to {MOST_TOKENS:,}")
    return Part(at, query, start, stop, tokens)


def value_of(body: bytes) -> Any:
    """A stored payload as data: JSON, or the text of a file; E3004 for other bytes."""
    try:
        return exactly(body)
    except ValueError:
        pass
    try:
        return body.decode()
    except UnicodeDecodeError:
        words = "read it whole: interlock calls payload REF --out FILE"
        raise Failure("E3004", "the payload is neither JSON nor text, so it has no parts", resolution=words) from None


def read_part(value: Any, part: Part, count: Counter) -> Json:
    """A part of a value, with its size and whether it was cut; E3004 if there is no such part."""
    found = pointed(value, part.at)
    if part.query:
        from interlock.window.queries import search

        found = search(part.query, found)
    whole = outline(found)
    if part.start is not None or part.stop is not None:
        if not isinstance(found, list | str):
            words = "name one with `at`, or leave the range out"
            raise Failure("E3004", f"a range is of a list or a text, and this is an {whole}", resolution=words)
        found = cast("Any", found)[part.start : part.stop]
    shown = found if part.tokens is None else truncated(found, part.tokens, count)
    if shown is None and found is not None:
        raise Failure("E3004", f"not even the beginning fits into {part.tokens:,} tokens", resolution="allow more")
    return {"value": shown, "of": whole, "tokens": count(plain(shown)), "truncated": shown is not found}


def pointed(value: Any, pointer: str) -> Any:
    """The value at a JSON pointer; E3004 if there is none."""
    if pointer and not pointer.startswith("/"):
        raise Failure("E3004", "a JSON pointer begins with /", resolution="write it like /items/0/name")
    for step in (one.replace("~1", "/").replace("~0", "~") for one in pointer.split("/")[1:]):
        if isinstance(value, dict) and step in value:
            value = cast("Json", value)[step]
        elif isinstance(value, list) and (place := _place(step)) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[place]
        else:
            words = f"there is nothing at `{pointer[:200]}`: `{step[:50]}` is not in the {outline(value)}"
            raise Failure("E3004", words, resolution="read without a pointer to see what there is")
    return value


def _place(step: str) -> int:
    """The place in a list that a step names; one behind every list if it names none."""
    return int(step) if step.isascii() and step.isdecimal() and len(step) < 10 else 1 << 62
