"""Tools as MCP describes them, each written down once.

A description depends on nothing but the admitted version, its name and its removal date, so it is made and encoded when
first needed and kept. Which of them a caller gets is asked anew every time.

A call may end in something other than the tool's result: it waits for a person, its result is kept to be read apart, or
it was only a preview. An output schema says so (`INSTEAD`), because clients check what they get against it. The output
schema of an upstream's tool that reads, or writes what can be undone, is the upstream's own (`Form.exact`): its results
are sent whole, and the rare answer that is none is an error to clients, which they do not check. A person is asked for
each call of an irreversible tool, so that answer is an ordinary one, and its schema says so.

A tool whose calls need an idempotency key has one more argument here (`KEY`): the protocol has no place for keys, and
nobody but the caller can say which two calls are one action. The operator of an upstream may have decided otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.api.apps import is_for_apps
from interlock.api.mcp_names import UI, Names, served_uri
from interlock.api.service import Service
from interlock.api.tools import Version
from interlock.call.context import Caller
from interlock.call.mcp import APPS
from interlock.call.prepared import Prepared
from interlock.contract.contract import Contract
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.data.untrusted import members
from interlock.doors.mcp.surface_tools import DOCUMENTS, SAMPLED

if TYPE_CHECKING:
    from interlock.api.comparisons import Expected

PAGE = 250
# In `_meta` of tools/list and of a search: what the client expects of tools, a schema of their input for each.
EXPECTS = "interlock/expects"
_MOST_DESCRIBED = 20_000
# Keywords that must stay at the root of a schema, where references to them lead.
_SHARED = ("$schema", "$defs", "definitions")

_STRUCTURED = "#/properties/structuredContent"

# The answer in place of a result. It has no description: schemas hold the words of those who wrote the tools.
INSTEAD: Json = {"type": "object", "properties": {"interlock": {"type": "object"}}, "required": ["interlock"]}


KEY = "idempotency_key"
_KEY_SCHEMA: Json = {
    "type": "string",
    "description": "Your own name for this action: sent twice, it is done once. Take a new one for a new action.",
    "minLength": 1,
    "maxLength": 255,
    "examples": ["order-17"],
}


@dataclass(frozen=True, slots=True)
class Described:
    """One tool: its description, the same as bytes, and how its results are put."""

    document: Json
    encoded: bytes
    form: Form
    # Whether only the interface of an MCP App uses it.
    for_apps: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a tool's results: unchanged (`native`), wrapped in an object (`wraps`), or the object itself."""

    native: bool
    wraps: bool
    # Arguments that a client repeats as headers; the SDK checks those.
    headers: bool
    # Whether its key is among its arguments here.
    keyed: bool
    # Whether its output schema is the upstream's own, which allows nothing but the tool's result.
    exact: bool
    writes: bool = False


_SURFACE = [Described(one, orjson.dumps(one), Form(False, False, False, False, True)) for one in DOCUMENTS.values()]
_SAMPLED = [Described(one, orjson.dumps(one), Form(False, False, False, False, True)) for one in SAMPLED.values()]


class Listing:
    """Descriptions of what a caller may use."""

    def __init__(self, service: Service, names: Names) -> None:
        self._service = service
        self._names = names
        self._described: dict[tuple[str, str, int, str], Described] = {}
        # The form of the results of a version.
        self.form: Callable[[Prepared], Form] = lru_cache(maxsize=1000)(_form_of_tool)

    async def page(
        self,
        caller: Caller,
        cursor: str | None,
        expected: Expected | None = None,
        *,
        shows_apps: bool,
        samples: bool = False,
    ) -> tuple[Sequence[Described], str | None]:
        """Return a page of the caller's tools and the cursor of the next page.

        Of a surface, all that it lists, with the tools that search and load others. `select_tool` is for clients whose
        model can be asked (`samples`). Tools for interfaces alone are listed to clients that show interfaces: others
        would give them to their model.
        """
        if caller.surface is not None and caller.surface.defers:
            # The first page has all of it. A cursor of an earlier time leads to nothing else.
            versions = await self._service.surfaces.listed(caller, cursor or "", expected)
            listed = [self.described(version) for version in versions]
            if cursor is not None:
                return [one for one in listed if shows_apps or not one.for_apps], None
            own = [*_SURFACE, *(_SAMPLED if samples else ())]
            return [*own, *(one for one in listed if shows_apps or not one.for_apps)], None
        page = await self._service.tools.page(caller, cursor, PAGE, expected)
        found = [self.described(version) for version in page.versions]
        return [one for one in found if shows_apps or not one.for_apps], page.cursor

    def described(self, version: Version) -> Described:
        """The description of a version."""
        row = version.row
        available = self._service.tools.availability(version)
        key = row.digest, self._names.of(row.address), row.notice.removal_ms if row.notice else 0, available
        found = self._described.get(key)
        if found is None:
            if len(self._described) >= _MOST_DESCRIBED:
                self._described.clear()
            document = describe(version, key[1], available)
            found = Described(document, orjson.dumps(document), form_of(version.contract), is_for_apps(version))
            self._described[key] = found
        return found


def describe(version: Version, name: str, available: str = "AVAILABLE") -> Json:
    """A version as MCP's `Tool`. What it says of safety is what was admitted, never what an upstream claims."""
    contract, manifest = version.contract, version.contract.manifest
    writes, irreversible = contract.mutation.writes, contract.mutation.mutation_class == "write_irreversible"
    title = manifest.title or manifest.name
    meta: Json = {
        **_own_meta(contract),
        "interlock/address": version.row.address,
        "interlock/version": version.row.version,
        "interlock/class": contract.mutation.mutation_class,
        "interlock/known_pairs": len(manifest.known_pairs),
    }
    if available != "AVAILABLE":
        meta["interlock/availability"] = available
    if version.row.notice is not None:
        meta["interlock/deprecation"] = version.row.notice.document()
    output = output_schema(contract)
    return {
        "name": name,
        "title": title,
        **({"description": manifest.full_description} if manifest.full_description else {}),
        "inputSchema": input_schema(contract),
        **({} if output is None else {"outputSchema": output}),
        **_icons(contract),
        "annotations": {
            "title": title,
            "readOnlyHint": not writes,
            "destructiveHint": irreversible,
            "idempotentHint": not writes,
            "openWorldHint": manifest.external_io,
        },
        "_meta": meta,
    }


def shows_apps(capabilities: Any) -> bool:
    """Whether a client that can do this shows the interfaces of MCP Apps."""
    return not members(members(capabilities).get("extensions")).keys().isdisjoint(APPS)


def can_sample(capabilities: Any) -> bool:
    """Whether the model of a client that can do this can be asked."""
    return "sampling" in members(capabilities)


def _own_meta(contract: Contract) -> Json:
    """The `_meta` that an MCP upstream adds to its tool. It is not Interlock's, and has none of Interlock's names.

    The interface of an MCP App that it names is named as it is served here.
    """
    manifest, execution = contract.manifest, contract.manifest.execution
    stated: Any = None if execution is None else execution.native.get("_meta")
    if execution is None or not contract.mcp_form or not isinstance(stated, dict):
        return {}
    bare = manifest.namespace != execution.target
    return cast("Json", stated if bare else _with_apps(stated, execution.target))


def _with_apps(stated: Any, upstream: str) -> Any:
    if isinstance(stated, dict):
        return {name: _with_apps(part, upstream) for name, part in cast("Json", stated).items()}
    if isinstance(stated, list):
        return [_with_apps(part, upstream) for part in cast("list[Any]", stated)]
    return served_uri(upstream, stated) if isinstance(stated, str) and stated.startswith(UI) else stated


def _icons(contract: Contract) -> Json:
    """The icons of an upstream's tool, as they were admitted."""
    execution = contract.manifest.execution
    icons: Any = None if execution is None else execution.native.get("icons")
    return {"icons": icons} if contract.mcp_form and icons else {}


def form_of(contract: Contract) -> Form:
    """The form of the results of a contract."""
    return Form(
        native=contract.mcp_form,
        wraps=not contract.mcp_form and contract.delivers.get("type") != "object",
        headers=b'"x-mcp-header"' in orjson.dumps(contract.input.model_facing),
        # A tool with an argument of that name keeps it; its key is sent in `_meta`.
        keyed=contract.idempotency.key_required
        and contract.idempotency.key_from == "caller"
        and KEY not in contract.input.document.get("properties", {}),
        exact=contract.mutation.mutation_class != "write_irreversible"
        and not contract.manifest.private_output
        and _structured(contract) is not None,
        writes=contract.mutation.writes,
    )


def _structured(contract: Contract) -> Json | None:
    """The schema of the structured content of an MCP upstream's tool, if it promises an object."""
    if not contract.mcp_form or contract.tolerates_off_schema:
        return None
    stated: Any = contract.delivers.get("properties", {}).get("structuredContent")
    promised = isinstance(stated, dict) and cast("Json", stated).get("type") == "object"
    return cast("Json", stated) if promised else None


def _form_of_tool(tool: Prepared) -> Form:
    return form_of(tool.contract)


def input_schema(contract: Contract) -> Json:
    """The schema of a tool's arguments, with the key where one is needed."""
    schema: Json = {**contract.input.model_facing, "type": "object"}
    if not form_of(contract).keyed:
        return schema
    properties = {**schema.get("properties", {}), KEY: _KEY_SCHEMA}
    return {**schema, "properties": properties, "required": [*schema.get("required", ()), KEY]}


def output_schema(contract: Contract) -> Json | None:
    """The schema of `structuredContent`: an object's, which MCP demands; None where there is nothing to promise."""
    schema, form = contract.delivers, form_of(contract)
    if contract.tolerates_off_schema:
        return None  # clients refuse a result that does not fit
    if form.native:
        stated = _structured(contract)
        if stated is None:
            return None
        schema = {**{key: schema[key] for key in ("$schema",) if key in schema}, **cast("Json", _lifted(stated))}
        if form.exact:
            return schema
    core = {key: part for key, part in schema.items() if key not in _SHARED}
    if form.wraps:
        core: Json = {"type": "object", "properties": {"result": core}, "required": ["result"]}
    interrupted = contract.mutation.writes or contract.manifest.persist_output
    if (form.wraps or interrupted) and not _movable(schema):
        return None
    shared = {key: schema[key] for key in _SHARED if key in schema}
    return {**shared, "type": "object", "anyOf": [core, INSTEAD]} if interrupted else {**shared, **core}


def _lifted(node: Any) -> Any:
    """A part of the schema of an upstream's result, as a schema of its own."""
    if isinstance(node, list):
        return [_lifted(one) for one in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    lifted = {name: _lifted(part) for name, part in cast("Json", node).items()}
    reference = lifted.get("$ref")
    if isinstance(reference, str) and reference.startswith(_STRUCTURED):
        lifted["$ref"] = f"#{reference.removeprefix(_STRUCTURED)}"
    return lifted


def _movable(node: Any) -> bool:
    """Whether a schema means the same one level further down: its references lead to what stays at the root."""
    if isinstance(node, list):
        return all(_movable(one) for one in cast("list[Any]", node))
    if not isinstance(node, dict):
        return True
    schema = cast("Json", node)
    reference: Any = schema.get("$ref", "#/$defs/")
    stays = isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))
    named = any(key in schema for key in ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"))
    return stays and not named and all(_movable(part) for part in schema.values())
