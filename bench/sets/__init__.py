"""Labelled sets for the tool search: `tools.jsonl` and `queries.jsonl` in a folder, also compressed (`.gz`).

A tool has an id, a name, a description, an input schema and maybe its server, with a description, and a category. A
query has a text and the ids of the relevant tools; `groups` of tools of which one is enough; maybe the steps of a task,
one a line. The two sets here are under the Apache License 2.0; `meta.json` names their sources.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock.search.index import IndexedTool

HERE = Path(__file__).parent
_NUMBER = re.compile(r"^\s*\d+[.)]\s*")


@dataclass(frozen=True, slots=True)
class Query:
    text: str
    needed: Sequence[frozenset[str]]
    steps: Sequence[str]


@dataclass(frozen=True, slots=True)
class Set:
    name: str
    entries: Sequence[IndexedTool]
    queries: Sequence[Query]


def load(folder: Path) -> Set:
    entries = [_entry(one) for one in _lines(folder, "tools")]
    return Set(folder.name, entries, [_query(one) for one in _lines(folder, "queries")])


def found(folder: Path = HERE) -> list[Path]:
    """Return the folders of sets: the folder itself, or those in it."""
    holds = [folder, *sorted(one for one in folder.iterdir() if one.is_dir())]
    return [one for one in holds if any(one.glob("tools.jsonl*")) and any(one.glob("queries.jsonl*"))]


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    packed = folder / f"{name}.jsonl.gz"
    with gzip.open(packed, "rt") if packed.exists() else (folder / f"{name}.jsonl").open() as file:
        for line in file:
            yield json.loads(line)


def _entry(tool: dict[str, Any]) -> IndexedTool:
    properties: dict[str, Any] = (tool.get("input_schema") or {}).get("properties") or {}
    parts = [one for one in properties.values() if isinstance(one, dict)]
    texts = [str(one["description"]) for one in parts if one.get("description")]
    choices = [" ".join(map(str, one["enum"])) for one in parts if isinstance(one.get("enum"), list)]
    return IndexedTool(
        id=tool["id"],
        name=tool["name"],
        description=tool.get("description") or "",
        parameters=list(properties),
        parameter_texts=[*texts, *choices],
        server=tool.get("server") or "",
        server_text=tool.get("server_description") or "",
        tags=[tool["category"]] if tool.get("category") else [],
    )


def _query(query: dict[str, Any]) -> Query:
    groups = query.get("groups") or [[one] for one in query["relevant"]]
    lines = (_NUMBER.sub("", line).strip() for line in (query.get("steps") or "").splitlines())
    return Query(query["query"], [frozenset(group) for group in groups], [line for line in lines if line])
