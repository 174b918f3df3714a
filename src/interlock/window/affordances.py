"""Tools within a token budget.

    tier 0   the index: one line for each tool a caller can see, by namespace
    tier 1   full schemas of the most useful tools; of a large schema, the top level
    tier 2   the nested parts of one schema, when a call is being written (`detail`)

Which schemas are loaded is a 0-1 knapsack problem: each has a utility and a size. Taking them by utility per token is
at least half as good as the best choice, provided that the result is compared with the single most useful schema that
fits. A schema that does not fit is replaced by its signature.

INVARIANT: the text never has more tokens than the budget by the counter in use, and `remaining` is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal, cast

from interlock.contract.executors import OWN_DESCRIPTION, PROTOCOLS
from interlock.core.expressions import expression
from interlock.core.record import dataclass
from interlock.data.canonical import encode
from interlock.data.schema import Json, Schema, properties_of, resolve_ref
from interlock.window.reading import pointed
from interlock.window.tokens import Counter

LINE_TOKENS: Final = 8
FEWEST_WORDS, MOST_WORDS = 3, 10
# A schema of more tokens is shown without its nested parts.
FOLDED_ABOVE: Final = 400
DETAIL: Final = "x-detail"
_MARKS: Final = {"read_only": "?", "write_reversible": "+", "write_irreversible": "!"}
_LEGEND: Final = "Tools by namespace (id: namespace.name). ? reads, + writes, can be undone, ! cannot be undone\n"
_MOST_SAMPLES: Final = 3
_WORD = expression(r"[^\W\d_][\w'-]*")
_PARTS = expression(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SENTENCE_END = expression(r"(?<=[.!?])\s|\n")
# Words that say nothing in a line of ten tokens.
_EMPTY: Final = frozenset(
    (
        "a", "an", "and", "are", "as", "at", "be", "by", "can", "for", "from", "given", "in", "into", "is", "it", "its",
        "of", "on", "or", "that", "the", "this", "to", "tool", "use", "using", "which", "will", "with", "you", "your",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Offer:
    """The sizes of a tool in a window, in tokens: of its line in the index, of its schema, and of its signature.

    `schema_tokens` is what the schema takes by the counter, or more where its author says so (`x-token-cost`).
    """

    id: str
    version: str
    mutation_class: str
    line: str
    line_tokens: int
    schema_tokens: int
    signature_tokens: int

    @property
    def namespace(self) -> str:
        return self.id.partition(".")[0]


def offer(tool: str, version: str, manifest: Json, count: Counter) -> Offer:
    """Measure a tool. The manifest is the admitted document; it is not kept."""
    mutation = str(manifest.get("mutation_class") or "write_irreversible")
    line = _line(tool.partition(".")[2] or tool, _MARKS.get(mutation, "!"), manifest, count)
    shown, signature = declaration(tool, manifest, count), signature_text(tool, manifest)
    size = count(_written(shown)) + _stated_above(shown["parameters"], count)
    return Offer(tool, version, mutation, line, count(line), size, count(signature))


def _stated_above(schema: Any, count: Counter) -> int:
    """The tokens that the properties of a schema take beyond those counted, by what its author states (`x-token-cost`).

    A stated cost is about the property with all that is in it. One below the count changes nothing.
    """
    if isinstance(schema, list):
        return sum(_stated_above(one, count) for one in cast("list[Any]", schema))
    if not isinstance(schema, dict):
        return 0
    part = cast("Json", schema)
    stated: Any = part.get("x-token-cost")
    if isinstance(stated, int):
        return max(0, stated - count(encode(part).decode()))
    inner = [*properties_of(part).values(), *(part.get(word) for word in ("items", "anyOf", "oneOf", "allOf"))]
    inner += [one for word in ("$defs", "definitions") for one in _members(part.get(word))]
    return sum(_stated_above(one, count) for one in inner)


def _members(value: Any) -> Iterable[Any]:
    return cast("Json", value).values() if isinstance(value, dict) else ()


def _line(name: str, mark: str, manifest: Json, count: Counter) -> str:
    """The line of a tool in the index: as many words of its hint as ten tokens hold, and at least three."""
    words = _hint(name, manifest)
    for most in range(min(len(words), MOST_WORDS), FEWEST_WORDS, -1):
        line = _inert(f"{name}{mark} {' '.join(words[:most])}\n")
        if count(line) <= LINE_TOKENS:
            return line
    return _inert(f"{name}{mark} {' '.join(words[:FEWEST_WORDS])}".rstrip() + "\n")


def _inert(text: str) -> str:
    """Text of a tool that cannot look like the delimiter of a result in the same context. JSON stays the same JSON."""
    return text.replace("<", "\\u003c")


def _hint(name: str, manifest: Json) -> list[str]:
    """The words that describe a tool: its search hint, or words of its description that its name does not have."""
    stated = str(manifest.get("search_hint") or "")
    if stated.strip():
        return stated.split()
    text = str(manifest.get("description") or "").strip()[:400]
    words = [one for one in _WORD.findall(_SENTENCE_END.split(text)[0]) if one.lower() not in _EMPTY]
    named = {part.lower().rstrip("s") for part in _PARTS.findall(name)}
    new = [one for one in words if one.lower().rstrip("s") not in named]
    return new if len(new) >= FEWEST_WORDS else words


# Schemas


def parameters_of(manifest: Json) -> Json:
    """The schema of the input as callers may see it."""
    stated: Any = manifest.get("parameters")
    if not isinstance(stated, dict):
        return {}
    protocol = PROTOCOLS.get(str(manifest.get("protocol")))
    closed = protocol is not None and protocol.written_here
    schema = Schema(cast("Json", stated), closed=closed, shared=True)
    return schema.model_facing if b'"x-internal"' in encode(schema.document) else schema.document


def declaration(tool: str, manifest: Json, count: Counter) -> Json:
    """A tool as it is loaded at tier 1: its nested parts left out where all of it would be large."""
    words = _own_words(manifest) or str(manifest.get("description") or "")
    whole = parameters_of(manifest)
    document: Json = {"name": tool, "description": words, "parameters": whole}
    if count(encode(document).decode()) <= FOLDED_ABOVE:
        return document
    return {**document, "parameters": folded(whole)}


def _own_words(manifest: Json) -> str:
    """The description of an upstream's tool in its own words, where a manifest cannot hold it."""
    execution: Any = manifest.get("execution")
    native: Any = cast("Json", execution).get("native") if isinstance(execution, dict) else None
    return str(cast("Json", native).get(OWN_DESCRIPTION) or "") if isinstance(native, dict) else ""


def schema_text(tool: str, manifest: Json, count: Counter) -> str:
    """A tool as one line of JSON, as it is loaded at tier 1."""
    return _written(declaration(tool, manifest, count))


def _written(document: Json) -> str:
    return _inert(f"{encode(document).decode()}\n")


def signature_text(tool: str, manifest: Json) -> str:
    """The least that says how a tool is called: `demo.post(account: string, note?: string)`."""
    schema = parameters_of(manifest)
    required: Any = schema.get("required") or ()
    parts = [
        f"{name}{'' if name in required else '?'}: {_type(resolve_ref(schema, part))}"
        for name, part in properties_of(schema).items()
    ]
    return _inert(f"{tool}({', '.join(parts)})\n")


def _type(part: Json) -> str:
    kind: Any = part.get("type")
    return "|".join(map(str, cast("list[Any]", kind))) if isinstance(kind, list) else str(kind or "any")


def folded(schema: Json) -> Json:
    """A schema without the inner structure of its properties. What is left out is named with its pointer."""
    shown = {name: part for name, part in schema.items() if name not in ("$defs", "definitions")}
    properties: Any = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    parts = cast("Json", properties).items()
    shown["properties"] = {name: _folded_part(schema, name, part) for name, part in parts}
    return shown


def _folded_part(schema: Json, name: str, part: Any) -> Any:
    if not isinstance(part, dict) or not _is_nested(cast("Json", part)):
        return cast("Any", part)
    known = resolve_ref(schema, cast("Json", part))
    members = {word: known[word] for word in ("type", "description", "default") if word in known}
    escaped = name.replace("~", "~0").replace("/", "~1")
    return {**members, DETAIL: f"/properties/{escaped}"}


def _is_nested(part: Json) -> bool:
    """Whether a property has a structure of its own, here or behind a reference."""
    if "$ref" in part or properties_of(part) or isinstance(part.get("additionalProperties"), dict):
        return True
    inner: list[Any] = [part.get("items"), *(one for word in ("anyOf", "oneOf", "allOf") for one in part.get(word, ()))]
    return any(isinstance(one, dict) and _is_nested(cast("Json", one)) for one in inner)


def detail(manifest: Json, pointer: str) -> Json:
    """The part of a tool's input schema at a JSON pointer, with the definitions it refers to; E3004 if it has none."""
    root = parameters_of(manifest)
    node = pointed(root, pointer)
    if not isinstance(node, dict):
        return {"const": node} if pointer else {}
    return {**cast("Json", node), **_definitions(root, cast("Json", node))}


_REFERENCE = expression(rb'"\$ref":"#/(\$defs|definitions)/([^"/]+)')


def _definitions(root: Json, node: Json) -> Json:
    """The definitions that a part of a schema refers to, directly or through others."""
    found: dict[str, Json] = {}
    waiting: list[Any] = [node]
    while waiting:
        for family, name in _REFERENCE.findall(encode(waiting.pop())):
            group, key = family.decode(), name.decode().replace("~1", "/").replace("~0", "~")
            known: Any = root.get(group)
            if isinstance(known, dict) and key in known and key not in found.setdefault(group, {}):
                found[group][key] = known[key]
                waiting.append(known[key])
    return {group: parts for group, parts in found.items() if parts}


# Sizes


def sizes(offers: Sequence[Offer]) -> Json:
    """The tokens that all tools take in a window: as an index, and with full schemas. N times the mean, for both."""
    number = len(offers)
    index, full = sum(one.line_tokens for one in offers), sum(one.schema_tokens for one in offers)
    return {
        "tools": number,
        "index_tokens": index,
        "index_mean": round(index / number, 1) if number else 0.0,
        "full_tokens": full,
        "full_mean": round(full / number, 1) if number else 0.0,
    }


# Choosing


def knapsack(items: Sequence[tuple[float, int]], capacity: int) -> list[int]:
    """Choose items, each with a utility and a size, that fit together. At least half as useful as the best choice.

    Items are taken by utility per token. That alone may end far below the best choice: a small item can keep out a
    large one that is worth much more. So the most useful single item is tried as the first one too.
    """
    usable = [place for place, (utility, size) in enumerate(items) if utility > 0 and size <= capacity]
    if not usable:
        return []
    usable.sort(key=lambda place: (-items[place][0] / max(items[place][1], 1e-9), place))
    best = max(usable, key=lambda place: items[place][0])
    choices = [_filled(items, usable, capacity), _filled(items, [best, *usable], capacity)]
    return max(choices, key=lambda choice: sum(items[place][0] for place in choice))


def _filled(items: Sequence[tuple[float, int]], order: Iterable[int], room: int) -> list[int]:
    taken: list[int] = []
    for place in dict.fromkeys(order):
        if items[place][1] <= room:
            taken.append(place)
            room -= items[place][1]
    return taken


Index = Literal["tools", "categories", "count", "none"]


@dataclass(frozen=True, slots=True)
class Affordances:
    """Tools within a budget. `text` is what the model gets; `loaded` has the schemas in it as data."""

    text: str
    tokens: int
    budget: int
    index: Index
    loaded: tuple[Json, ...]
    signatures: tuple[str, ...]
    left_out: tuple[str, ...]
    sizes: Json

    @property
    def remaining(self) -> int:
        """The tokens of the budget that are left."""
        return self.budget - self.tokens

    def document(self) -> Json:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "budget": self.budget,
            "remaining": self.remaining,
            "index": self.index,
            "loaded": list(self.loaded),
            "signatures": list(self.signatures),
            "left_out": list(self.left_out),
            **self.sizes,
        }


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the text: the index, a schema or a signature."""

    kind: Literal["index", "schema", "signature"]
    text: str
    tool: str = ""


def compile_affordances(
    offers: Sequence[Offer],
    utilities: Mapping[str, float],
    budget: int,
    manifest_of: Callable[[str], Json],
    count: Counter,
) -> Affordances:
    """Choose what a model gets of the tools in order of name: an index of all, and the most useful schemas that fit.

    `utilities` names the candidates for their schemas; tools without a utility are in the index alone.
    """
    index, text = next(one for one in _indexes(offers) if count(one[1]) <= budget)
    room = budget - count(text)
    ranked = sorted((one for one in offers if utilities.get(one.id, 0) > 0), key=lambda one: -utilities[one.id])
    items = [(utilities[one.id], one.schema_tokens) for one in ranked]
    chosen = set(knapsack(items, room)) if index != "none" else set[int]()
    pieces = [_Piece("index", text)]
    for place in sorted(chosen):
        one = ranked[place]
        pieces.append(_Piece("schema", schema_text(one.id, manifest_of(one.id), count), one.id))
        room -= one.schema_tokens
    for place, one in enumerate(ranked):
        if place in chosen:
            continue
        if index == "none":
            break
        signature = _Piece("signature", signature_text(one.id, manifest_of(one.id)), one.id)
        room -= one.signature_tokens
        # Parts that are counted one by one may have a few tokens more than the whole.
        if room < 0 and (room := budget - count(_joined([*pieces, signature]))) < 0:
            break
        pieces.append(signature)
    # A counter by which the whole has more tokens than its parts costs the last of them.
    while (tokens := count(text := _joined(pieces))) > budget:
        pieces.pop()
    placed = {one.tool for one in pieces}
    return Affordances(
        text=text,
        tokens=tokens,
        budget=budget,
        index=index,
        loaded=tuple(declaration(one.tool, manifest_of(one.tool), count) for one in pieces if one.kind == "schema"),
        signatures=tuple(one.tool for one in pieces if one.kind == "signature"),
        left_out=tuple(one.id for one in ranked if one.id not in placed),
        sizes=sizes(offers),
    )


def _joined(pieces: Iterable[_Piece]) -> str:
    return "".join(one.text for one in pieces)


def _indexes(offers: Sequence[Offer]) -> Iterator[tuple[Index, str]]:
    """The index and what takes its place where it is too large: categories, then their number, then nothing."""
    groups = {name: list(group) for name, group in groupby(offers, key=lambda one: one.namespace)}
    yield "tools", _LEGEND + "".join(f"{name}:\n{''.join(one.line for one in group)}" for name, group in groups.items())
    yield (
        "categories",
        "Tools by namespace; search for one by what it does\n"
        + "".join(
            f"{name}: {len(group)} tools, such as {', '.join(_names(group))}\n" for name, group in groups.items()
        ),
    )
    yield "count", f"{len(offers)} tools; search for one by what it does\n"
    yield "none", ""


def _names(group: Sequence[Offer]) -> list[str]:
    return [one.id.partition(".")[2] for one in group[:_MOST_SAMPLES]]
