"""Tool formats of the model providers: OpenAI (chat and responses), Anthropic and Gemini, in both directions.

Export: a contract becomes a provider's declaration, and a provider's tool call becomes a name and arguments of ours
(`provider_answers` makes the message that answers it). Import: a provider's declarations become definitions, to be
registered like those of any upstream.

Strict mode makes a model write arguments that fit, in a part of JSON Schema that providers can enforce: closed objects,
every property required. `strict_form` converts a schema to it, if that loses nothing that a caller could send: an
optional property may be null instead, and bounds go into the description. `restored` removes the nulls again. The
gateway always checks arguments against the contract, strict or not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import orjson

from interlock.call.connector import Definition, Discovered
from interlock.contract.contract import Contract
from interlock.contract.wire_names import provider_name
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json, properties_of, resolve_ref
from interlock.upstreams.schemas import rewrite

Provider = Literal["openai-chat", "openai-responses", "anthropic", "gemini"]

# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def address_of(name: str, addresses: Iterable[str], own: Mapping[str, str] | None = None) -> str:
    """Return the address for a provider's name; E3101 for a name that was never exported.

    `own` has the names of tools that are exported under their upstreams' own, by address.
    """
    there = own or {}
    known = {there.get(address) or provider_name(address): address for address in addresses}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise Failure("E3101", f"no tool is called `{name[:80]}`" + (f"; did you mean `{near[0]}`?" if near else ""))


# ── declarations ────────────────────────────────────────────────────────────────────────────────────────────────────


def declare(
    contract: Contract,
    provider: Provider,
    *,
    name: str | None = None,
    strict: bool = False,
    defer_loading: bool = False,
) -> Json:
    """Export a tool as a provider's declaration, under its `name` at its upstream or, by default, its id.

    `strict` is set if the schema has a strict form. `defer_loading` is set if the provider supports it; the others get
    the whole tool. Both are also set for a tool that a provider's declaration brought in with them.
    """
    execution = contract.manifest.execution
    imported: Json = {} if execution is None else execution.native
    if imported.get("protocol") == "function_calling":
        strict = strict or imported.get("strict") is True
        defer_loading = defer_loading or imported.get("defer_loading") is True
    name, words = name or provider_name(contract.address), contract.manifest.full_description
    schema = contract.input.model_facing
    narrow = strict_form(schema) if strict and provider != "gemini" else None
    shown = schema if narrow is None else narrow
    later: Json = {"defer_loading": True} if defer_loading else {}
    match provider:
        case "openai-chat":
            function = {"name": name, "description": words, "parameters": shown, "strict": narrow is not None}
            return {"type": "function", "function": function}
        case "openai-responses":
            facts = {"name": name, "description": words, "parameters": shown, "strict": narrow is not None}
            return {"type": "function", **facts, **later}
        case "anthropic":
            flags: Json = {"strict": True} if narrow is not None else {}
            return {"name": name, "description": words, "input_schema": shown, **flags, **later}
        case "gemini":
            return {"name": name, "description": words, "parametersJsonSchema": shown}


class _Loose(Exception):  # noqa: N818 - an outcome, caught where the form is asked for
    """A schema that has no strict form."""


_ALLOWED = frozenset(
    {
        "type",
        "description",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "anyOf",
        "$defs",
    }
)
_BOUNDS = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
        "format", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "default",
    }
)  # fmt: skip
_NOTES = frozenset({"title", "examples", "example", "$schema", "$comment", "deprecated", "readOnly", "writeOnly"})


def strict_form(schema: Json) -> Json | None:
    """Convert a schema to strict mode, or None if that would refuse values that the schema allows."""
    try:
        return cast("Json", rewrite(schema, _strict))
    except _Loose:
        return None


def _strict(node: Json) -> Json:
    if "oneOf" in node and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")
    if "definitions" in node and "$defs" not in node:
        node["$defs"] = node.pop("definitions")
    defined = {"$defs": node["$defs"]} if "$defs" in node else {}
    ref = node.get("$ref")
    if ref is not None:
        match = re.match(r"#/(?:\$defs|definitions)/([^/]+)\Z", str(ref))
        if match is None:
            raise _Loose
        return {"$ref": f"#/$defs/{match[1]}", **defined}
    unknown = {word for word in node if not word.startswith("x-")} - _ALLOWED - _BOUNDS - _NOTES
    if unknown or not node.keys() & {"type", "enum", "const", "anyOf"}:
        raise _Loose
    strict = {word: value for word, value in node.items() if word in _ALLOWED}
    bounds = ", ".join(f"{word}: {orjson.dumps(node[word]).decode()}" for word in node if word in _BOUNDS)
    if bounds:
        strict["description"] = f"{strict.get('description', '')} ({bounds})".strip()
    kind = node.get("type")
    if kind == "object" or "properties" in node or (isinstance(kind, list) and "object" in kind):
        properties = cast("Json", node.get("properties") or {})
        if node.get("additionalProperties", bool(not properties and "properties" not in node)) is not False:
            raise _Loose
        needed = cast("list[str]", node.get("required") or [])
        if not all(isinstance(part, dict) for part in properties.values()):
            raise _Loose
        strict["properties"] = {name: part if name in needed else _or_null(part) for name, part in properties.items()}
        strict["required"] = list(properties)
        strict["additionalProperties"] = False
    elif (kind == "array" or (isinstance(kind, list) and "array" in kind)) and not isinstance(node.get("items"), dict):
        raise _Loose
    return strict


def _or_null(part: Json) -> Json:
    if _takes_null(part, part):
        return part
    kind = part.get("type")
    if isinstance(kind, str | list) and "const" not in part and "anyOf" not in part:
        kinds = [kind] if isinstance(kind, str) else cast("list[str]", kind)
        wider = {**part, "type": [*kinds, "null"]}
        return wider | {"enum": [*part["enum"], None]} if "enum" in part else wider
    if "anyOf" in part and "type" not in part:
        return {**part, "anyOf": [*part["anyOf"], {"type": "null"}]}
    return {"anyOf": [part, {"type": "null"}]}


def _takes_null(root: Json, raw: Json) -> bool:
    part = resolve_ref(root, raw)
    kind, branches = part.get("type"), part.get("anyOf") or part.get("oneOf")
    if "enum" in part or "const" in part:
        return None in part.get("enum", [part.get("const", "")])
    if kind is not None and "null" not in (cast("list[str]", kind) if isinstance(kind, list) else [kind]):
        return False
    if isinstance(branches, list):
        return any(_takes_null(root, _mapping(branch)) for branch in cast("list[Any]", branches))
    return "$ref" not in part and "not" not in part and "allOf" not in part


def restored(schema: Json, arguments: Json) -> Json:
    """Remove the nulls that stand for omitted properties from the arguments of a strict call."""
    return cast("Json", _restored(schema, schema, arguments))


def _restored(root: Json, raw: Json, value: Any) -> Any:
    part = resolve_ref(root, raw)
    if isinstance(value, list):
        items: Any = part.get("items")
        inner = cast("Json", items) if isinstance(items, dict) else {}
        return [_restored(root, inner, item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    known, needed = properties_of(part), part.get("required") or ()
    return {
        name: _restored(root, known.get(name, {}), item)
        for name, item in cast("Json", value).items()
        if item is not None or name in needed or name not in known or _takes_null(root, known[name])
    }


# ── calls and answers ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model, in any provider's format. `sent` are its arguments as the model wrote them."""

    provider: Provider
    name: str
    sent: Any
    id: str | None

    @property
    def arguments(self) -> Json:
        """The arguments; E3301, in words for the model, if it wrote something that is no JSON object."""
        if self.sent is None or self.sent == "":
            return {}
        parsed = self.sent
        if isinstance(parsed, str):
            try:
                parsed = orjson.loads(parsed)
            except orjson.JSONDecodeError as error:
                raise _unusable(self.name, f"are not JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(parsed, dict):
            raise _unusable(self.name, f"are {_KINDS.get(parsed.__class__, 'a number')}")
        return cast("Json", parsed)


_KINDS: Mapping[type, str] = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}


def _unusable(name: str, why: str) -> Failure:
    words = f"the arguments of `{name[:80]}` {why}; send one JSON object with the arguments by name"
    return Failure("E3301", words, resolution="call the tool again with arguments that are one JSON object")


def read_call(payload: Any) -> ToolCall:
    """Read a provider's tool call, recognised by its form; E3004 if it is none, or cannot be answered.

    The mistakes of a model, in arguments or the name of a tool, are not found here: the model is told of those.
    """
    call = cast("Json", payload) if isinstance(payload, dict) else {}
    inner: Any = call.get("functionCall") or call.get("function_call")
    match call.get("type"):
        case "function" if isinstance(call.get("function"), dict):
            function = cast("Json", call["function"])
            return _call("openai-chat", function.get("name"), function.get("arguments"), call.get("id"))
        case "function_call":
            return _call("openai-responses", call.get("name"), call.get("arguments"), call.get("call_id"))
        case "tool_use":
            return _call("anthropic", call.get("name"), call.get("input"), call.get("id"))
        case None if isinstance(inner, dict):  # a part of Gemini's answer
            part = cast("Json", inner)
            return _call("gemini", part.get("name"), part.get("args"), part.get("id"))
        case None if "name" in call and call.keys() & {"args", "id"}:  # the call in it
            return _call("gemini", call["name"], call.get("args"), call.get("id"))
        case _:
            raise Failure("E3004", "this is no tool call of OpenAI, Anthropic or Gemini")


def _call(provider: Provider, name: Any, arguments: Any, ident: Any) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise Failure("E3004", "the tool call names no tool")
    # Gemini's calls have no ids with many models: the answer is matched by name and order.
    ident = ident or None if provider == "gemini" else ident
    if not isinstance(ident, str) and (provider != "gemini" or ident is not None):
        raise Failure("E3004", f"the call of `{name[:80]}` has no id to answer to")
    return ToolCall(provider, name, arguments, ident)


# ── declarations of others ──────────────────────────────────────────────────────────────────────────────────────────


def definitions(document: Any, *, native: Mapping[str, Any] | None = None) -> Discovered:
    """Read a provider's list of tools. `native` states how they are reached.

    Providers' declarations rarely describe the result of a tool: the overlay supplies it.
    """
    tools: list[Definition] = []
    refused: list[tuple[str, str]] = []
    for index, one in enumerate(_declarations(document)):
        declared = _mapping(one.get("function")) if one.get("type") == "function" and "function" in one else one
        name = declared.get("name")
        if one.get("type") not in (None, "function", "custom") or not isinstance(name, str) or not name:
            refused.append(
                (str(name or one.get("type") or f"tool {index + 1}"), "it is not a function; it has no schema")
            )
            continue
        schema = next((declared[word] for word in _INPUTS if declared.get(word) is not None), None)
        output = next((declared[word] for word in _OUTPUTS if declared.get(word) is not None), None)
        flags = {word: declared[word] for word in ("strict", "defer_loading") if isinstance(declared.get(word), bool)}
        try:
            takes, gives = _NOTHING if schema is None else _spelt(schema), None if output is None else _spelt(output)
        except Failure as failure:
            refused.append((name, failure.message))
            continue
        known = {"protocol": "function_calling", "name": name, **flags, **(native or {})}
        tools.append(Definition(name, str(declared.get("description") or ""), takes, gives, known))
    return Discovered(tools, refused)


_INPUTS = ("parameters", "input_schema", "parametersJsonSchema", "parameters_json_schema")
_OUTPUTS = ("output_schema", "responseJsonSchema", "response_json_schema", "response")
_DEEPEST_LIST = 6
_NOTHING: Json = {"type": "object", "properties": {}, "additionalProperties": False}


def _mapping(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _declarations(document: Any, deep: int = 0) -> list[Json]:
    """Return the declarations in a list, a request, a Gemini tool, or a single one."""
    if deep > _DEEPEST_LIST:
        raise Failure("E3004", "lists of declarations are nested too deeply")
    if isinstance(document, list):
        return [declaration for one in cast("list[Any]", document) for declaration in _declarations(one, deep + 1)]
    one = _mapping(document)
    for word in ("tools", "functionDeclarations", "function_declarations"):
        if isinstance(one.get(word), list):
            return _declarations(one[word], deep + 1)
    return [one] if one else []


def _spelt(schema: Any) -> Json:
    """Convert a schema to the spelling of JSON Schema: Gemini writes types in capitals, counts as text, and null as a
    flag.
    """

    def change(node: Json) -> Json:
        kind = node.get("type")
        if isinstance(kind, str):
            node["type"] = kind.lower()
        if node.pop("nullable", False) is True and isinstance(kind, str):
            node["type"] = [kind.lower(), "null"]
        for word in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
            if isinstance(node.get(word), str) and node[word].isdigit():
                node[word] = int(node[word])
        return node

    return _mapping(rewrite(schema, change))
