"""External mappings: the ids that a native protocol has for a tool or a call, stored beside our own.

There is one model for each protocol, and their union. Declarations and calls both hold mappings; a mapping knows
neither.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from interlock.contract.standard.document import Amount, Count, Document, Flag, Json, Refs


class ToolExternalMapping(Document):
    """The ids by which a native protocol knows the same tool or call."""

    OBJECT = "tool_external_mapping"

    @classmethod
    def form(cls) -> Any:
        return ExternalMapping if cls is ToolExternalMapping else cls


class McpMapping(ToolExternalMapping):
    kind: Literal["mcp"] = "mcp"
    server_id: str | None = None
    mcp_session_id: str | None = None
    mcp_protocol_version: str | None = None
    method: str | None = None
    tool_name: str | None = None
    jsonrpc_request_id: StrictInt | str | None = None
    structured_content: Any = Field(default=None, alias="structuredContent")
    is_error: Flag | None = Field(default=None, alias="isError")
    meta: Json | None = Field(default=None, alias="_meta")


class OpenApiMapping(ToolExternalMapping):
    kind: Literal["openapi"] = "openapi"
    operation_id: str | None = None
    method: str | None = None
    path: str | None = None
    server_url: str | None = None
    security_scheme_refs: Refs | None = None


class FunctionCallingMapping(ToolExternalMapping):
    kind: Literal["function_calling"] = "function_calling"
    tool_call_id: str | None = None
    function_name: str | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: Flag | None = None
    strict: Flag | None = None
    defer_loading: Flag | None = None


class A2aMapping(ToolExternalMapping):
    kind: Literal["a2a"] = "a2a"
    agent_card_url: str | None = None
    agent_skill_id: str | None = None
    task_id: str | None = None
    context_id: str | None = None
    message_id: str | None = None
    artifact_id: str | None = None


class CliMapping(ToolExternalMapping):
    kind: Literal["cli"] = "cli"
    command_id: str | None = None
    argv_ref: str | None = None
    cwd_ref: str | None = None
    env_policy_ref: str | None = None
    exit_code: StrictInt | None = None
    signal: StrictInt | str | None = None
    sandbox_ref: str | None = None


class BrowserMapping(ToolExternalMapping):
    kind: Literal["browser"] = "browser"
    browser_session_id: str | None = None
    page_id: str | None = None
    action_id: str | None = None
    observation_ref: str | None = None
    screenshot_ref: str | None = None


class TelemetryMapping(ToolExternalMapping):
    kind: Literal["telemetry"] = "telemetry"
    trace_id: str | None = None
    span_id: str | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    request_id: str | None = None
    duration_ms: Amount | None = None
    result_size_bytes: Count | None = None


ExternalMapping = Annotated[
    McpMapping | OpenApiMapping | FunctionCallingMapping | A2aMapping | CliMapping | BrowserMapping | TelemetryMapping,
    Field(discriminator="kind"),
]
