"""`search_tools`, `load_tools` and `read_result`: how a model gets at tools and results too large to be sent whole.

Clients whose own model can be asked (`sampling`) have `select_tool` too: their model chooses among the candidates.
They are part of the list of tools, not of the catalog: they read the registry for their caller, as `tools/list` does,
and the caller's own results, as `resources/read` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from interlock.api.mcp_names import Names
from interlock.api.service import Service
from interlock.api.surfaces import MOST_AT_ONCE, MOST_PER_QUERY, MOST_QUERIES
from interlock.api.tools import Version
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.window.reading import LONGEST, asked

if TYPE_CHECKING:
    from interlock.api.comparisons import Expected
    from interlock.api.types import Selector

SEARCH: Final = "search_tools"
LOAD: Final = "load_tools"
READ: Final = "read_result"
SELECT: Final = "select_tool"
# In `_meta` of a search: the tools that were found and are not loaded, as `deferred_tool_ref` of the standard.
DEFERRED: Final = "interlock/deferred"
_DEFAULT_LIMIT: Final = 5
_LONGEST_QUERY: Final = 1000
_LONGEST_LINE: Final = 160
# The tokens of one part of a result, unless the model says how many, and at most.
_PART_TOKENS, _MOST_PART_TOKENS = 2000, 20_000

_READS = {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False}
DOCUMENTS: Mapping[str, Json] = {
    SEARCH: {
        "name": SEARCH,
        "title": "Search tools",
        "description": (
            "Find tools by what they do. More tools exist than are listed here. Search before you decide that something"
            " cannot be done. Write one query for each step of the task, such as ['find a customer by mail address',"
            " 'refund a payment'], not one query for the whole task. Then load what fits with load_tools."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "queries": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": _LONGEST_QUERY},
                    "minItems": 1,
                    "maxItems": MOST_QUERIES,
                    "description": "what a tool is to do, one query per step",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MOST_PER_QUERY,
                    "default": _DEFAULT_LIMIT,
                    "description": "how many tools per query",
                },
            },
            "required": ["queries"],
            "additionalProperties": False,
        },
        "annotations": {"title": "Search tools", **_READS},
    },
    LOAD: {
        "name": LOAD,
        "title": "Load tools",
        "description": (
            "Load tools that search_tools found, by name. Returns what each takes; after that they can be called, and"
            " are in the list of tools."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "names": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 600},
                    "minItems": 1,
                    "maxItems": MOST_AT_ONCE,
                    "description": "names of tools, as search_tools returns them",
                }
            },
            "required": ["names"],
            "additionalProperties": False,
        },
        "annotations": {"title": "Load tools", **_READS},
    },
    READ: {
        "name": READ,
        "title": "Read a result",
        "description": (
            "Read a part of a result that was too large to be shown. Such a result names its reference, payload:…"
            " The arguments apply in their order; what is still too long is cut, and stays JSON."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "ref": {"type": "string", "maxLength": 200, "description": "the reference: payload:…"},
                "at": {"type": "string", "maxLength": LONGEST, "description": "a JSON pointer, such as /items/0"},
                "query": {"type": "string", "maxLength": LONGEST, "description": "JMESPath, such as items[].name"},
                "start": {"type": "integer", "description": "first item of a list, or character of a text"},
                "stop": {"type": "integer", "description": "the one after the last"},
                "tokens": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": _MOST_PART_TOKENS,
                    "default": _PART_TOKENS,
                    "description": "how many tokens it may have",
                },
            },
            "required": ["ref"],
            "additionalProperties": False,
        },
        "annotations": {"title": "Read a result", **_READS},
    },
}

# For clients that let their model be asked.
SAMPLED: Mapping[str, Json] = {
    SELECT: {
        "name": SELECT,
        "title": "Select a tool",
        "description": (
            "Find and load the one tool for a step, in words such as 'refund a payment'. Candidates are narrowed down,"
            " and your client's model chooses among them. Returns the tool with what it takes, and whether you may call"
            " it."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "request": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": _LONGEST_QUERY,
                    "description": "what is to be done, one step",
                }
            },
            "required": ["request"],
            "additionalProperties": False,
        },
        "annotations": {"title": "Select a tool", **_READS},
    },
}


class SurfaceTools:
    """Answers calls of them. `describe` is how a tool is listed."""

    def __init__(self, service: Service, names: Names, describe: Callable[[Version], Json]) -> None:
        self._app = service.app
        self._surfaces = service.surfaces
        self._names = names
        self._describe = describe

    async def call(
        self,
        name: str,
        arguments: Json,
        caller: Caller,
        selector: Selector | None = None,
        *,
        session: str = "",
        apps: bool = False,
        expected: Expected | None = None,
    ) -> Json | None:
        """The result of a call; None if it is a call of another tool. Raises Failure for a mistake of the model.

        Tools for interfaces alone are found by clients that show interfaces (`apps`). `selector` is the model of a
        client that can be asked. Without one there is no `select_tool`. `session` is that of the call. A search finds
        no tool that is not what the caller expects of it (`expected`).
        """
        if caller.surface is None or not caller.surface.defers:
            return None
        if name == SELECT and selector is not None:
            document, meta = await self._select(arguments, caller, selector, session)
        elif name in DOCUMENTS:
            search = partial(self._search, apps=apps, expected=expected)
            answers = {SEARCH: search, LOAD: partial(self._load, apps=apps), READ: self._read}
            document, meta = await answers[name](arguments, caller)
        else:
            return None
        content = [{"type": "text", "text": orjson.dumps(document).decode()}]
        result: Json = {"content": content, "structuredContent": document, "resultType": "complete"}
        return {**result, "_meta": meta} if meta else result

    async def _search(
        self, arguments: Json, caller: Caller, *, apps: bool, expected: Expected | None
    ) -> tuple[Json, Json]:
        queries = _texts(arguments, "queries", {"queries", "limit"})
        limit = arguments.get("limit", _DEFAULT_LIMIT)
        if limit.__class__ is not int:
            raise Failure("E3004", "`limit` is a whole number")
        surface = caller.surface
        results: list[Json] = []
        refs: dict[str, Json] = {}
        answers = await self._surfaces.search(queries, caller, limit, apps=apps, expected=expected)
        for query, (answer, deferred) in zip(queries, answers, strict=True):
            refs |= {one["tool_id"]: one for one in deferred}
            # The tools are in order of their scores, which say nothing more to a model.
            tools = [
                {
                    "name": self._names.of(one.version.row.address),
                    "does": _line(one.document()["description"]),
                    "changes": one.document()["mutation_class"],
                    "loaded": surface is None or surface.has(one.version.row.address),
                }
                for one in answer
            ]
            facts = answer.facts()
            # For a model, facts that say nothing are left out.
            notes = {name: facts[name] for name in ("note", "pending") if facts[name]}
            results.append({"query": query, "outcome": facts["outcome"], "tools": tools, **notes})
        # For programs; a model has what it needs in the content.
        return {"results": results}, {DEFERRED: list(refs.values())} if refs else {}

    async def _load(self, arguments: Json, caller: Caller, *, apps: bool) -> tuple[Json, Json]:
        names = [self._names.address(one) for one in _texts(arguments, "names", {"names"})]
        found = await self._surfaces.load(names, caller, apps=apps)
        shown = [self._describe(one) for one in found]
        parts = ("name", "description", "inputSchema")
        return {"tools": [{part: one[part] for part in parts if part in one} for one in shown]}, {}

    async def _select(self, arguments: Json, caller: Caller, selector: Selector, session: str) -> tuple[Json, Json]:
        """Choose a tool by the client's own model, and load it if the gate does not deny it."""
        request: Any = arguments.get("request")
        if not isinstance(request, str) or arguments.keys() != {"request"}:
            raise Failure("E3004", "send `request`, a text", resolution=_AS_LISTED)
        made = await self._app.select(
            request[:_LONGEST_QUERY], caller=caller, selector=selector, session=session, door="mcp"
        )
        verdict = made.verdict
        selection: Json = {
            "tool": None,
            "parameters": made.parameters,
            "refused": made.refused,
            "gate": None if verdict is None else {"answer": verdict.answer, "reason": verdict.reason},
        }
        if made.chosen is not None:
            selection["tool"] = {"name": self._names.of(made.chosen)}
        if made.chosen is not None and verdict is not None and verdict.answer != "DENY":
            (shown,) = (await self._load({"names": [self._names.of(made.chosen)]}, caller, apps=False))[0]["tools"]
            selection["tool"] = shown
        return selection, {}

    async def _read(self, arguments: Json, caller: Caller) -> tuple[Json, Json]:
        ref: Any = arguments.get("ref")
        if not isinstance(ref, str) or arguments.keys() - DOCUMENTS[READ]["inputSchema"]["properties"].keys():
            raise Failure("E3004", "send `ref`, the reference of a result", resolution=_AS_LISTED)
        part = asked(**{"tokens": _PART_TOKENS, **{name: one for name, one in arguments.items() if name != "ref"}})
        if part.tokens is None or part.tokens > _MOST_PART_TOKENS:
            raise Failure("E3004", f"`tokens` is a whole number from 1 to {_MOST_PART_TOKENS:,}", resolution=_AS_LISTED)
        return await self._app.read_part(ref[:200], part, caller=caller), {}


_AS_LISTED: Final = "send the arguments that the schema lists"


def _texts(arguments: Json, name: str, known: set[str]) -> Sequence[str]:
    given: Any = arguments.get(name)
    texts = cast("list[Any]", given) if isinstance(given, list) else []
    if not texts or arguments.keys() - known or not all(isinstance(one, str) for one in texts):
        raise Failure("E3004", f"send `{name}`, a list of texts", resolution=_AS_LISTED)
    if any(len(one) > _LONGEST_QUERY for one in texts):
        raise Failure("E3004", f"each of `{name}` has at most {_LONGEST_QUERY:,} characters")
    return texts


def _line(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= _LONGEST_LINE else f"{first[: _LONGEST_LINE - 1]}…"
