"""Files that users write about upstreams, read before anything is asked of a data directory or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.upstreams.client_config import ClientConfig


def overlay_of(text: str) -> Json:
    """The overlay that a text states; E3004 if it is none."""
    from interlock.upstreams.overlay import parse_overlay

    return parse_overlay(text).model_dump(mode="json", exclude_unset=True)


def openapi_of(content: bytes) -> Json:
    """An OpenAPI or Swagger document; E3105 if it is none."""
    from interlock.upstreams.openapi import parse

    return parse(content)


def servers_of(document: Json) -> list[str]:
    """The addresses of the servers that an OpenAPI or Swagger document names."""
    from interlock.upstreams import openapi

    return openapi.servers_of(document)


def servers_in(
    file: Path,
    *,
    environment: Mapping[str, str],
    ask: Callable[[str, str, bool], str | None],
    plain: Sequence[str],
) -> ClientConfig:
    """The MCP servers in the configuration of a client. OSError if the file cannot be read."""
    from interlock.upstreams.client_config import read_client_config

    return read_client_config(_content(file), path=file, environment=environment, ask=ask, plain=plain)


def lists_interlock_alone(file: Path) -> bool:
    """Whether the configuration of a client has Interlock as its only server. OSError if it cannot be read."""
    from interlock.upstreams.client_config import is_ours

    return is_ours(_content(file))


def _content(file: Path) -> bytes:
    from interlock.upstreams.client_config import MOST_BYTES

    with file.open("rb") as stream:
        return stream.read(MOST_BYTES + 1)
