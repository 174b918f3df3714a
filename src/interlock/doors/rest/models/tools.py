"""Bodies of tools: registration, listing, providers, deprecation and quarantine."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field

from interlock.api.providers import Provider
from interlock.doors.rest.models.common import Answer, Body, Json, Name, Names, Query, Text, example, few

ECHO: Json = {
    "tool_id": "echo_tool",
    "namespace": "demo",
    "version": "1.0.0",
    "name": "Echo Tool",
    "description": "Echoes its input back",
    "provider": "local",
    "protocol": "native",
    "mutation_class": "read_only",
    "parameters": {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "what to send back", "examples": ["Hello World"]}},
        "required": ["message"],
    },
    "result_schema": {"type": "object", "properties": {"echoed": {"type": "string"}}, "required": ["echoed"]},
    "required_permissions": [],
    "idempotency": {},
    "observability": {},
    "timeout_class": "standard",
    "execution": {
        "kind": "program",
        "target": "jq",
        "argv": ["jq", "-c", "{echoed: .message}"],
        "stdin": "json",
        "parse": "json",
    },
}


class ManifestBody(pydantic.RootModel[Json]):
    """A manifest, as schemas/manifest.json in the repository describes it."""

    model_config = ConfigDict(json_schema_extra={"examples": [ECHO]})


class Registered(Answer):
    tool_id: str = Field(examples=["demo.echo_tool"])
    version: str = Field(examples=["1.0.0"])
    new: bool = Field(description="false where exactly this was registered before")
    warnings: list[str] = Field([])


class ToolsQuery(Query):
    q: str | None = Field(None, max_length=1000, description="what the tool is to do, or words of it")
    by: Literal["words", "meaning", "both"] = Field("both", description="what counts in a search with `q`")
    cursor: str | None = Field(None, max_length=600, description="where the page before ended")
    limit: int | None = Field(
        None,
        ge=1,
        le=500,
        description="how many tools at most; where it is not given, 100 of a list and 10 of a search",
    )
    expected: str | None = Field(
        None,
        max_length=50_000,
        description="an object as JSON text: by name, a schema of the input that you would send to a tool. Tools that "
        "do not take such input are left out",
        examples=['{"demo.balance":{"type":"object","properties":{"account":{"type":"string"}}}}'],
    )


class CompareQuery(Query):
    old: Name = Field(description="a version")
    new: Name = Field(description="a version")


class Comparison(Answer):
    """The changes between two versions of a tool, and the step up in version that they need."""

    tool: str
    old: str
    new: str
    level: str = Field(description="none, patch, minor or major")
    bump: str = Field(description="the step between the two versions")
    changes: list[Json]


class DeclarationsQuery(Query):
    provider: Provider = Field(description="the provider whose format to use")
    tool: Names = Field([], description="only these tools; repeat")
    strict: bool = Field(False, description="the strict form, where a tool's schema has one")
    cursor: str | None = Field(None, max_length=600, description="where the page before ended")
    limit: int = Field(100, ge=1, le=500)


class Declarations(Answer):
    """Tools as a model provider takes them: what stands in the `tools` of a request."""

    tools: list[Json]
    cursor: str | None = Field(None, description="where to go on; null at the end")


class ProviderCallBody(Body):
    """A tool call as a model made it, in its provider's form."""

    model_config = ConfigDict(
        json_schema_extra=example(
            call={"type": "tool_use", "id": "toolu_01A09q90qw90lq9178", "name": "demo__balance",
                  "input": {"account": "cash"}},
        )
    )  # fmt: skip

    call: Json = Field(description="the tool call of OpenAI (chat or responses), Anthropic or Gemini, as it came")
    idempotency_key: str | None = Field(
        None, max_length=255, description="the key of a call that has no id, as many of Gemini's; goes before the id"
    )
    session_id: str = Field("", max_length=600)


class ProviderAnswer(Answer):
    """The outcome of a call, and the message for its model."""

    invocation_id: str
    state: str
    message: Json = Field(description="what goes into the conversation next")
    follow_up: list[Json] = Field(
        [],
        description="messages that go after the answers to all tool calls of the turn: images and files for OpenAI's "
        "chat, whose tool messages hold text only",
    )


class Tool(Answer):
    tool_id: str
    version: str
    name: str
    description: str
    state: str
    availability: Literal["AVAILABLE", "UNAVAILABLE"] = Field(
        "AVAILABLE", description="UNAVAILABLE while the upstream that serves the tool does not answer"
    )
    mutation_class: str | None
    parameters: Json
    result_schema: Json | bool | None = None
    known_pairs: int = Field(0, description="known input-output pairs that it is held to; 0: it has none")
    interface: Json | None = Field(None, description="the tool_interface of one tool that is asked for by its id")
    warnings: list[str] = Field(
        [],
        description="parameters of one tool of an upstream, asked for by its id, without a description or an example",
    )
    deprecation: Json | None = None
    score: float | None = Field(None, description="how well it fits a search, from 0 to 1")


class Tools(Answer):
    tools: list[Tool]
    deferred: list[Json] = Field(
        [],
        description="found, and to be loaded before they are called, where `surface_doors` has rest: without schemas",
    )
    cursor: str | None = Field(None, description="where to go on; null at the end")
    by: str | None = Field(None, description="what counted in a search: words, meaning or both")
    note: str | None = Field(None, description="why a search was by words only")
    outcome: str | None = Field(
        None, description="of a search: found, no_match, or pending where upstreams may have more later"
    )
    pending: list[Json] = Field([], description="upstreams that are being looked at or do not answer: server and state")


class NegotiateBody(Body):
    model_config = ConfigDict(
        json_schema_extra=example(
            expected={"demo.balance": {"type": "object", "properties": {"account": {"type": "string"}}}}
        )
    )

    expected: Annotated[dict[str, Json], BeforeValidator(few)] = Field(
        max_length=1000, description="a schema of the input you would send to each tool"
    )


class Match(Answer):
    tool_id: str
    version: str
    outcome: Literal["FULL_MATCH", "PARTIAL_MATCH", "INCOMPATIBLE"]
    missing: list[str] = Field(description="parts that you expect and the tool does not offer")


class Negotiated(Answer):
    matches: list[Match]
    tools: list[Tool] = Field(description="those that you can use, without the incompatible ones")


class Versions(Answer):
    tool_id: str
    versions: list[Json]


class ToolQuery(Query):
    version: str | None = Field(None, max_length=200, description="a version or a range")


class DeprecateBody(Body):
    model_config = ConfigDict(json_schema_extra=example(version="1.0.0", successor="demo.echo_tool@2.0.0", days=30))

    version: Name
    successor: Name | None = None
    guide: Name | None = Field(None, description="address of a page that says how to move over")
    days: int | None = Field(None, ge=0, le=36_500, description="how long it still runs; 90 where it is not said")
    amend: bool = Field(False, description="correct what was announced before; what is not said stays")
    anyway: bool = Field(False, description="the successor is yet to be registered")


class Deprecated(Answer):
    tool_id: str
    version: str
    state: Literal["deprecated"]
    deprecation: Json


class QuarantineEntry(Answer):
    tool: str
    digest: str
    invocation_id: str = Field(description="the call that it was quarantined for, or the upstream that changed it")
    reason: str
    since: str
    lifted: bool


class QuarantineEntries(Answer):
    quarantine: list[QuarantineEntry]


class ReleaseBody(Body):
    model_config = ConfigDict(json_schema_extra=example(tool="demo.count@1.0.0", reason="the file was its own cache"))

    tool: Name = Field(description="TOOL@VERSION, or the digest of its content")
    reason: Text = Field(min_length=1)


class Released(Answer):
    released: str
    reason: str
