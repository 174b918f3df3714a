"""The API's document as a page to read: no script, and nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, cast

import orjson

from interlock.data.schema import Json

CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd } summary { cursor: pointer; padding: .3rem 0 }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { background: #f6f6f4; padding: .8rem; overflow-x: auto }
.method { display: inline-block; min-width: 4.5rem; font-weight: 600 } .what { color: #555 } td { padding-right: 1rem }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd } pre { background: #222 }
.what { color: #aaa } h2 { border-color: #444 } a { color: #8ab4f8 } }
"""


def page(document: Json) -> str:
    """The whole page."""
    info: Json = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, method, operation in _operations(document):
        tags: list[str] = operation.get("tags") or ["other"]
        by_tag.setdefault(tags[0], []).append(_operation(document, path, method, operation))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(shown)}" for tag, shown in by_tag.items())
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        f"<p>{escape(info.get('summary', ''))} Send a token with every request: <code>Authorization: Bearer …</code>."
        f' For programs: <a href="openapi.json">openapi.json</a>.</p>{sections}</body></html>'
    )


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    paths = cast("dict[str, dict[str, Json]]", document["paths"])
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield path, method, operation


def _operation(document: Json, path: str, method: str, operation: Json) -> str:
    says = escape(str(operation.get("description") or operation.get("summary") or ""))
    name = f"<span class=method>{method.upper()}</span><code>{escape(path)}</code>"
    shown = [f"<details><summary>{name} <span class=what>{says}</span></summary>"]
    parameters: list[Json] = operation.get("parameters") or []
    rows = [(str(one["name"]), str(one["in"]), str(one.get("description") or "")) for one in parameters]
    shown.append(_table(rows))
    body = _example(document, operation.get("requestBody"))
    if body is not None:
        shown.append(f"<p>send</p><pre>{body}</pre>")
    responses = cast("dict[str, Json]", operation["responses"])
    for status, response in responses.items():
        example = _example(document, response)
        text = f"<p><b>{escape(status)}</b> {escape(str(response.get('description', '')))}</p>"
        shown.append(text if example is None else f"{text}<pre>{example}</pre>")
    return "".join([*shown, "</details>"])


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = (f"<tr><td><code>{escape(name)}</code><td>{escape(where)}<td>{escape(says)}" for name, where, says in rows)
    return f"<table>{''.join(cells)}</table>" if rows else ""


def _example(document: Json, holder: Json | None) -> str | None:
    """The example that a body's schema gives, if it gives one."""
    content: dict[str, Json] = {} if holder is None else holder.get("content", {})
    schema: Json = content.get("application/json", {}).get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][str(schema["$ref"]).rpartition("/")[2]]
    examples: list[Any] = schema.get("examples") or []
    return escape(orjson.dumps(examples[0], option=orjson.OPT_INDENT_2).decode()) if examples else None
