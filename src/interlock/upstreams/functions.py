"""Function schemas of model providers as an upstream: the schema describes a function, an HTTP service carries it out.

A provider's schema has no code behind it, so the operator states where its functions are carried out: each call is a
POST of the arguments, as JSON, to `path` at one of `urls`. `{function}` in `path` stands for the function's name.
Everything else (credentials, retries, limits on answers) is as for any HTTP service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson
import pydantic

from interlock.call.connector import Definition, Discovered
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.bounds import check_values
from interlock.data.schema import Json
from interlock.upstreams import formats
from interlock.upstreams.http import HttpUpstream
from interlock.upstreams.http_requests import HttpConfig
from interlock.upstreams.kinds import Site
from interlock.upstreams.response_limits import in_thread

# Limits on what is read at once, and on the schemas of one function: larger ones would block the server at admission.
MOST_BYTES, MOST_VALUES = 2 << 20, 50_000
MOST_BYTES_OF_ONE, MOST_VALUES_OF_ONE = 128 << 10, 4_000
_NAME = expression(r"[A-Za-z_][A-Za-z0-9_.:-]{0,127}", re.ASCII)
# Providers' declarations rarely describe the result of a function; the overlay can.
_ANYTHING: Json = {"type": ["string", "object", "array", "number", "boolean", "null"]}


class FunctionsConfig(HttpConfig):
    """A provider's list of tools, and the HTTP service that carries them out."""

    declarations: list[Any] | dict[str, Any]
    path: str = pydantic.Field("/{function}", pattern=r"^/[^?#]*$")

    @pydantic.model_validator(mode="after")
    def _declared(self) -> FunctionsConfig:
        if self.tools or self.openapi is not None:
            raise ValueError("functions are declared in `declarations`; leave `tools` and `openapi` out")
        return self


class FunctionsUpstream(HttpUpstream):
    """Functions that a provider's schemas declare, carried out by one HTTP service."""

    def mapping(self, native: Json, reported: Json) -> Json | None:
        flags = {word: native[word] for word in ("strict", "defer_loading") if word in native}
        return {"kind": "function_calling", "function_name": native["name"], **flags}

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        assert isinstance(self._config, FunctionsConfig)
        return await in_thread(read, self._config.declarations, self._config.path)


def read(declarations: Any, path: str) -> Discovered:
    """Read the declared functions. One that cannot be used is refused by itself; E3004 if there are too many."""
    try:
        written = orjson.dumps(declarations)
    except (TypeError, orjson.JSONEncodeError):
        raise Failure("E3004", "the declarations are no JSON, or are nested too deeply") from None
    if len(written) > MOST_BYTES:
        raise Failure("E3004", f"the declarations have more than {MOST_BYTES:,} bytes; register them in parts")
    check_values(written, MOST_VALUES)
    discovered = formats.definitions(declarations)
    if not discovered.tools and not discovered.refused:
        advice = "give the `tools` of a request to OpenAI, Anthropic or Gemini, or a list of such declarations"
        raise Failure("E3004", "the document declares no function", resolution=advice)
    tools: list[Definition] = []
    refused = list(discovered.refused)
    for one in discovered.tools:
        why = _objection(one)
        if why:
            refused.append((one.name[:128], why))
            continue
        native = {**one.native, "method": "POST", "path": path.replace("{function}", one.name)}
        tools.append(replace(one, native=native, output_schema=one.output_schema or _ANYTHING))
    return Discovered(tools, refused)


def _objection(one: Definition) -> str:
    """Return why a declaration is refused; empty if it is not."""
    if not _NAME.fullmatch(one.name):
        return "its name is not one that providers take: a letter or `_`, then letters, digits and `_ . : -`"
    written = orjson.dumps([one.input_schema, one.output_schema, one.description])
    if len(written) > MOST_BYTES_OF_ONE:
        return f"its schema has more than {MOST_BYTES_OF_ONE:,} bytes"
    try:
        check_values(written, MOST_VALUES_OF_ONE)
    except Failure:
        return f"its schema has more than {MOST_VALUES_OF_ONE:,} values"
    return ""


def make(name: str, config: Json, site: Site) -> FunctionsUpstream:
    """Make the connector of one upstream, not connected yet."""
    return FunctionsUpstream(name, FunctionsConfig.from_document(config), clock=site.clock, services=site.services)
