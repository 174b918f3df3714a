"""Parts of a result for a model: texts, and media that are handed on as they are.

A result holds media in three places: blocks of an MCP tool's value, items of content that a tool attached, and files
that the call left. `parts_of` lists all of them in one form, so that each endpoint only has to know how its protocol
writes an image or a file. Base64 data never becomes text: a model pays for every character of it and can read none.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from interlock.call.results import Result
from interlock.contract.attached import for_models
from interlock.core.record import dataclass
from interlock.data.bounds import PREVIEW_CHARS
from interlock.data.canonical import encode
from interlock.data.schema import Json

# Base64 characters of one medium that is handed on. Larger ones are named, and can be read by their reference.
LARGEST = 5 << 20
# Characters of a text that came as bytes.
LONGEST_FILE = 25_000
_MEDIA = ("image", "audio")
_TEXTS = frozenset({"application/json", "application/xml", "application/yaml", "application/x-ndjson", "image/svg+xml"})


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a recording or a file. `data` is base64; without it, the medium is only named."""

    mime_type: str
    name: str
    size: int
    data: str | None = None
    ref: str | None = None

    def words(self) -> str:
        """Describe a medium that is not shown to the model."""
        reference = f", kept as {self.ref}" if self.ref else ""
        return f"({self.name or 'data'}: {self.mime_type}, {self.size} bytes{reference}; not shown)"

    def as_text(self) -> str | None:
        """Its text, if it is one and not too long."""
        if self.data is None or not (self.mime_type.startswith("text/") or self.mime_type in _TEXTS):
            return None
        if self.size > LONGEST_FILE:
            return None
        try:
            return base64.b64decode(self.data, validate=True).decode()
        except (binascii.Error, ValueError):
            return None


Part = str | Media


def text_for_model(result: Result) -> str:
    """The text of a result that is shown as text alone. Of one without a value, the reason and what can be done."""
    if result.error is None or result.pending:
        return result.text()
    return f"{result.text()}\nWhat to do: {result.error.resolution}"


def parts_of(result: Result, files: Mapping[str, bytes] | None = None, *, blocks: bool = False) -> list[Part]:
    """The parts of a result, text first. `blocks`: its value is that of an MCP tool. `files` has the content of files
    that the call left, by reference; the others are only named.
    """
    if not result.ok or result.persistence.private:
        return [text_for_model(result)]
    parts: list[Part] = []
    rest, media = split_blocks(result.value) if blocks else (result.value, [])
    shown = result if not blocks else replace(result, value=_as_read(rest))
    if not media or rest.get("content") or "structuredContent" in rest:
        parts.append(shown.text())
    parts += [_block_media(one) for one in media]
    parts += [_attached(one) for one in for_models(result.content)]
    for one in result.artifacts:
        mime_type = mimetypes.guess_type(one.path)[0] or "application/octet-stream"
        content = (files or {}).get(one.ref)
        data = None if content is None else base64.b64encode(content).decode()
        parts.append(Media(mime_type, one.path, one.size, data, one.ref))
    return parts


def split_blocks(value: Any) -> tuple[Json, list[Json]]:
    """The value of an MCP tool without its media, and the blocks that hold those."""
    if not isinstance(value, dict) or not isinstance(cast("Json", value).get("content"), list):
        return {"structuredContent": value}, []
    given = cast("Json", value)
    blocks = [cast("Json", one) for one in cast("list[Any]", given["content"]) if isinstance(one, dict)]
    media = [one for one in blocks if data_of(one) is not None]
    return {**given, "content": [one for one in blocks if data_of(one) is None]}, media


def data_of(block: Json) -> str | None:
    """The base64 data of a block, if it has any."""
    held: Any = block.get("data") if block.get("type") in _MEDIA else None
    if block.get("type") == "resource" and isinstance(block.get("resource"), dict):
        held = block["resource"].get("blob")
    return held if isinstance(held, str) else None


def _as_read(value: Json) -> Any:
    """The texts of an MCP tool's value; its structured content, or all of it, where texts do not say it all."""
    blocks = cast("list[Json]", value.get("content", []))
    texts = [_text_of(one) for one in blocks]
    if not texts or None in texts:
        return value.get("structuredContent", value) if not texts else value
    return "\n".join(cast("Iterable[str]", texts))


def _text_of(block: Json) -> str | None:
    match block.get("type"):
        case "text":
            text = block.get("text")
        case "resource" if isinstance(block.get("resource"), dict):
            text = block["resource"].get("text")
        case "resource_link":
            text = " ".join(str(block[name]) for name in ("name", "uri", "description") if block.get(name))
        case _:
            text = None
    return text if isinstance(text, str) else None


def _block_media(block: Json) -> Media:
    held: Json = block["resource"] if block["type"] == "resource" else block
    name = str(held.get("uri") or block["type"]).rpartition("/")[2]
    return _media(held.get("mimeType"), name, cast("str", data_of(block)))


def _media(mime_type: Any, name: str, data: str) -> Media:
    mime_type = mime_type if isinstance(mime_type, str) and mime_type else "application/octet-stream"
    size = len(data) * 3 // 4
    return Media(mime_type.partition(";")[0].strip().lower(), name[:200], size, data if len(data) <= LARGEST else None)


def _attached(item: Json) -> Part:
    """An item of content that a tool attached."""
    data, uri = item.get("data") or item.get("blob"), item.get("uri")
    if data:
        return _media(item.get("mime_type"), str(item.get("name") or uri or item["type"]).rpartition("/")[2], data)
    match item["type"]:
        case "json":
            return encode(item["value"]).decode()
        case "text" | "diff" | "embedded_resource":
            return str(item.get("text") or item.get("diff") or uri or "")
        case _:
            return " ".join(str(one) for one in (item.get("name"), uri) if one)[:PREVIEW_CHARS]
