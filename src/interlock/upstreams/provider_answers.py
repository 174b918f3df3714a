"""Messages that tell a model the outcome of its tool call, in the form of each provider.

Images and documents become native content where the provider takes their type in the answer to a tool call. Tool
messages of OpenAI's chat hold text only: there, media go into a user message that follows the answers of the turn.
Other media are named in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interlock.call.media import Media, Part
from interlock.data.schema import Json
from interlock.upstreams.formats import Provider, ToolCall

_PDF = "application/pdf"
_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
# The types that a provider takes in a tool's answer, by its documentation.
NATIVE: dict[Provider, frozenset[str]] = {
    "openai-chat": _IMAGES | {_PDF},
    "openai-responses": _IMAGES | {_PDF},
    "anthropic": _IMAGES | {_PDF},
    "gemini": (_IMAGES - {"image/gif"}) | {_PDF},
}


def answer(call: ToolCall, parts: Sequence[Part], *, failed: bool, value: Any = None) -> tuple[Json, list[Json]]:
    """The message, or the part of one, that gives a model the outcome of its call, and the messages that follow it.

    `value` is the result as data, for providers that take it so; without one, they get the text.
    """
    read = [_readable(call.provider, one) for one in parts]
    text = "\n".join(one for one in read if isinstance(one, str))
    media = [one for one in read if isinstance(one, Media)]
    match call.provider:
        case "openai-chat":
            message: Json = {"role": "tool", "tool_call_id": call.id, "content": text or _see_below(media)}
            if not media:
                return message, []
            whose: Json = {"type": "text", "text": f"From {call.name} (tool call {call.id}):"}
            return message, [{"role": "user", "content": [whose, *(_chat(one) for one in media)]}]
        case "openai-responses":
            output: Any = [_responses(one) for one in read] if media else text
            return {"type": "function_call_output", "call_id": call.id, "output": output}, []
        case "anthropic":
            flags: Json = {"is_error": True} if failed else {}
            return {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [_anthropic(one) for one in read],
                **flags,
            }, []
        case "gemini":
            response: Json = {"error": text} if failed else {"output": text if value is None else value}
            # The first part is the result in words; what a tool attached comes after it.
            further = [one for one in read[1:] if isinstance(one, str)]
            response |= {"content": further} if value is not None and further else {}
            named: Json = {} if call.id is None else {"id": call.id}
            inline = [{"inlineData": {"mimeType": one.mime_type, "data": one.data}} for one in media]
            shown: Json = {"parts": inline} if inline else {}
            return {"functionResponse": {**named, "name": call.name, "response": response, **shown}}, []


def _readable(provider: Provider, part: Part) -> Part:
    """A part as this provider takes it: a medium of a type that it knows, or text."""
    if isinstance(part, str) or (part.data is not None and part.mime_type in NATIVE[provider]):
        return part
    text = part.as_text()
    return part.words() if text is None else text


def _see_below(media: Sequence[Media]) -> str:
    return "see the next message" if media else ""


def _url(media: Media) -> str:
    return f"data:{media.mime_type};base64,{media.data}"


def _file_name(media: Media) -> str:
    return media.name if media.name.endswith(".pdf") else f"{media.name or 'document'}.pdf"


def _chat(media: Media) -> Json:
    if media.mime_type == _PDF:
        return {"type": "file", "file": {"filename": _file_name(media), "file_data": _url(media)}}
    return {"type": "image_url", "image_url": {"url": _url(media)}}


def _responses(part: Part) -> Json:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if part.mime_type == _PDF:
        return {"type": "input_file", "filename": _file_name(part), "file_data": _url(part)}
    return {"type": "input_image", "image_url": _url(part), "detail": "auto"}


def _anthropic(part: Part) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    source: Json = {"type": "base64", "media_type": part.mime_type, "data": part.data}
    if part.mime_type == _PDF:
        return {"type": "document", "source": source, "title": _file_name(part)}
    return {"type": "image", "source": source}
