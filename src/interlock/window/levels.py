"""A result at five sizes, and the choice between them.

    L0   all of it
    L1   the fields that are asked for, or that its schema requires or lists
    L2   a summary by a second model, where there is one
    L3   facts: a name and a value for each
    L4   one value: a number, a word, or how many there are

INVARIANT: no level has more tokens than the one before. A level that would be larger is the one before.

The level with the lowest sum of cost and loss is chosen: cost is the share of the room that the text takes, loss is a
constant of the level. A task in which an error is expensive weighs loss, one that handles many results weighs cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, cast

from interlock.core.record import dataclass
from interlock.data.bounds import Shortener
from interlock.data.canonical import encode
from interlock.data.schema import Json, properties_of, resolve_ref
from interlock.window.tokens import Counter

Level = Literal[0, 1, 2, 3, 4]
LOSS: Final[dict[int, float]] = {0: 0.0, 1: 0.15, 2: 0.35, 3: 0.6, 4: 0.95}
Criticality = Literal["high", "normal", "batch"]
# How much loss weighs against cost.
WEIGHTS: Final[dict[Criticality, float]] = {"high": 0.95, "normal": 0.6, "batch": 0.35}
MOST_FACTS: Final = 40
_LONGEST_FACT: Final = 80
_LONGEST_SCALAR: Final = 40
_DEEPEST: Final = 20


@dataclass(frozen=True, slots=True)
class View:
    """A result at one level, or a pointer to it."""

    level: Level | Literal["pointer"]
    text: str
    tokens: int


def texts(value: Any, schema: Json | None, fields: Sequence[str] = (), summary: str | None = None) -> dict[Level, str]:
    """A result at each level there is. Sizes are compared when the texts are counted."""
    made: dict[Level, str] = {0: plain(value), 1: plain(_selected(value, schema or {}, schema or {}, fields, 0))}
    if summary is not None:
        made[2] = summary
    made[3] = "\n".join(_facts(value)) or plain(_scalar(value))
    made[4] = plain(_scalar(value))
    return made


def views(made: dict[Level, str], count: Counter, wrap: Callable[[str], str]) -> list[View]:
    """The texts as they stand in the context, with their sizes: none larger than the one before."""
    found: list[View] = []
    for level, text in sorted(made.items()):
        block = wrap(text)
        tokens = count(block)
        if found and tokens > found[-1].tokens:
            block, tokens = found[-1].text, found[-1].tokens
        found.append(View(level, block, tokens))
    return found


def choose(among: Sequence[View], room: int, weight: float) -> View | None:
    """The view with the lowest weighted sum of cost and loss that fits; None if none does."""
    fitting = [one for one in among if one.tokens <= room]
    return min(
        fitting,
        key=lambda one: ((1 - weight) * one.tokens / max(room, 1) + weight * LOSS[cast("int", one.level)], one.level),
        default=None,
    )


def plain(value: Any) -> str:
    """A value as a model reads it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else encode(value).decode()


def _selected(value: Any, schema: Json, root: Json, fields: Sequence[str], level: int) -> Any:
    """The members of objects that are asked for; else those that the schema requires, or lists."""
    if level > _DEEPEST:
        return value
    node = resolve_ref(root, schema)
    if isinstance(value, list):
        items: Any = node.get("items")
        inner: Json = cast("Json", items) if isinstance(items, dict) else {}
        return [_selected(one, inner, root, fields, level + 1) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    members = cast("Json", value)
    listed = properties_of(node)
    required: Any = node.get("required")
    wanted: Any = fields or required or listed or [name for name, one in members.items() if one not in (None, "", [])]
    chosen = {name: one for name, one in members.items() if name in wanted or _holds(one, fields)}
    if not chosen:
        return members
    return {name: _selected(one, listed.get(name, {}), root, fields, level + 1) for name, one in chosen.items()}


def _holds(value: Any, fields: Sequence[str], level: int = 0) -> bool:
    """Whether a field that is asked for is somewhere inside a value."""
    if not fields or level > _DEEPEST:
        return False
    if isinstance(value, dict):
        members = cast("Json", value)
        return any(name in members for name in fields) or any(
            _holds(one, fields, level + 1) for one in members.values()
        )
    return isinstance(value, list) and any(_holds(one, fields, level + 1) for one in cast("list[Any]", value))


def _facts(value: Any) -> Iterator[str]:
    """`name: value` for each value that is not a list or an object, in order, and the length of each list."""
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    count = 0
    while waiting:
        if count >= MOST_FACTS:
            yield "…"
            return
        path, one, level = waiting.pop()
        if isinstance(one, dict) and level < _DEEPEST:
            inner = [(f"{path}.{name}" if path else name, part, level + 1) for name, part in cast("Json", one).items()]
            waiting += reversed(inner)
        elif isinstance(one, list):
            items = cast("list[Any]", one)
            yield f"{path or 'items'}: {len(items)} items"
            count += 1
            waiting += reversed([(f"{path}[{place}]", part, level + 1) for place, part in enumerate(items[:3])])
        else:
            yield f"{path or 'value'}: {_short(one, _LONGEST_FACT)}"
            count += 1


def _scalar(value: Any) -> Any:
    """One value for a result: itself where it is one, the number of items, or the only number or truth in it."""
    if isinstance(value, list):
        return f"{len(cast('list[Any]', value))} items"
    if isinstance(value, dict):
        simple = [one for one in cast("Json", value).values() if isinstance(one, bool | int | float)]
        return simple[0] if len(simple) == 1 else f"{len(cast('Json', value))} fields"
    return _short(value, _LONGEST_SCALAR) if isinstance(value, str) else value


def _short(value: Any, most: int) -> str:
    text = plain(value) if not isinstance(value, str) else value[: most + 1].replace("\n", " ")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def truncated(value: Any, limit: int, count: Counter) -> Any:
    """As much of a value as fits into so many tokens. It stays JSON: what is left out is named in its place.

    None if not even the beginning fits.
    """
    if count(plain(value)) <= limit:
        return value
    low, high, best = 1, 8 * max(limit, 1), None
    while low <= high:
        middle = (low + high) // 2
        short = Shortener(characters=middle, values=max(middle // 8, 2)).shorten(value)
        if count(plain(short)) <= limit:
            low, best = middle + 1, short
        else:
            high = middle - 1
    return best


def outline(value: Any) -> str:
    """The structure of a value in a few words: what it is, how large, and the names in it."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return f"list of {len(items)}" + (f", each {outline(items[0])}" if items else "")
    if isinstance(value, dict):
        names = list(cast("Json", value))
        more = f", {len(names) - 8} more" if len(names) > 8 else ""
        return f"object with {', '.join(_short(name, 30) for name in names[:8])}{more}"[:300]
    return f"text of {len(value)} characters" if isinstance(value, str) else type(value).__name__
