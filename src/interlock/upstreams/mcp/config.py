"""Configuration of an MCP server: its address or command, and how it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pydantic

from interlock.core.errors import Failure
from interlock.upstreams.mcp.protocol import Era
from interlock.upstreams.remote_config import ConfigPart, Tls, checked_url, header_safe
from interlock.upstreams.response_limits import MAX_BYTES, MAX_VALUES


class McpConfig(ConfigPart):
    """An MCP server: `command` for a program to run, `url` for one that runs elsewhere.

    `credentials` maps each secret to the environment variable or header in which it is lent; a secret that is lent as
    Authorization and names no scheme is sent as a bearer token. `questions`: whether the questions of a server of the
    handshake era are passed on; callers whose clients can be asked then have conversations of their own. `logs`:
    whether its log messages during a call are passed on to clients that want them; each such caller then has a
    conversation of their own, so by default this is done only by `url`, where that costs no process. `apps`: whether
    the extension for MCP Apps is declared to the server; many servers list other tools to clients that declare it.
    `tasks`: whether tasks of the server are followed for every client (`follow`), or the server may make tasks only of
    the calls of clients that take tasks themselves (`relay`); it then refuses calls of other clients that need a task.
    `send_caller`: whether each call says for whom it is made, in its `_meta` and, by `url`, in headers; by default only
    to programs (`command`) and to servers on private networks (`allow_private`). `conversations_per_caller`: how many
    conversations one caller may have open; by default 8 by `command` and 64 by `url`.
    """

    command: tuple[str, ...] = ()
    env: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    credentials: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    protocol: Era = "auto"
    send_caller: bool | None = None
    questions: bool = True
    logs: bool | None = None
    apps: bool = False
    tasks: Literal["follow", "relay"] = "follow"
    conversations_per_caller: int | None = pydantic.Field(None, ge=1, le=256)
    allow_private: bool = False
    tls: Tls = Tls()
    max_response_bytes: int = pydantic.Field(MAX_BYTES, ge=1, le=1_073_741_824)
    max_response_values: int = pydantic.Field(MAX_VALUES, ge=1, le=100_000_000)

    @property
    def sends_caller(self) -> bool:
        """Whether the server is sent the caller's id, which is personal data to a third party."""
        if self.send_caller is None:
            return self.url is None or self.allow_private
        return self.send_caller

    def own_client(self, client: str) -> str:
        """Return the session of a client with conversations of its own (by `url`); empty if those of a caller share."""
        return "" if self.url is None else client

    def lent(self, credentials: Mapping[str, str]) -> dict[str, str]:
        """Return the caller's secrets under the names that the upstream knows; E3602 if one is missing."""
        lent: dict[str, str] = {}
        for shown, secret in self.credentials.items():
            value = credentials.get(secret)
            if not value:
                raise Failure("E3602", f"the call needs the credential `{secret}`: interlock secrets set {secret}")
            if shown.lower() == "authorization" and " " not in value:
                value = f"Bearer {value}"
            lent[shown] = value
        return lent

    @pydantic.field_validator("url")
    @classmethod
    def _plain(cls, url: str | None) -> str | None:
        if url is not None:
            checked_url(url, ("http", "https"))
        return url

    @pydantic.model_validator(mode="after")
    def _one_place(self) -> McpConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("say either command or url")
        if self.url is None and self.headers:
            raise ValueError("headers go with url; a command has env")
        if self.url is not None and (self.env or self.cwd):
            raise ValueError("env and cwd go with command; a url has headers")
        for name, value in self.headers.items():
            header_safe(name, value)
            if name.lower() in ("authorization", "proxy-authorization", "cookie"):
                raise ValueError(f"`{name}` would keep a credential in clear; name the secret in `credentials`")
        return self
