"""Channels by which approvers are notified that a call waits for them.

A channel is of one of three kinds: `console` (nothing is sent; people look for themselves), `webhook` (a signed request
of our own), or `url` (any of the services that apprise supports: mail, chat, pagers). Records and tables contain the
name of a channel and never its address, because addresses contain passwords.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

import pydantic

SECRET = "{secret}"  # noqa: S105 - where the password goes, not the password


class Channel(pydantic.BaseModel):
    """One channel, and the groups of approvers that it reaches."""

    # The refusal of an address must not repeat it.
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    name: Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    groups: tuple[str, ...] = pydantic.Field(
        default=("*",), description="groups of approvers it reaches; * is all of them"
    )
    console: bool = pydantic.Field(default=False, description="nothing is sent: people run interlock approvals watch")
    url: pydantic.SecretStr | None = pydantic.Field(
        default=None, description="an apprise address, such as mailtos://me:{secret}@example.com"
    )
    webhook: pydantic.SecretStr | None = pydantic.Field(
        default=None, description="an https address that takes signed requests"
    )
    secret: str | None = pydantic.Field(
        default=None, description="name of the stored secret that signs a webhook, or stands for {secret} in url"
    )
    secret_file: Path | None = pydantic.Field(
        default=None,
        description="the same from a file; while a secret is changed, both, one to a line, the newer first",
    )
    proxy: pydantic.SecretStr | None = pydantic.Field(
        default=None, description="an http or https proxy for url; proxies of the environment are not used"
    )
    allow_private: bool = pydantic.Field(default=False, description="may lead to this machine or a private network")

    @pydantic.model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if (self.console, self.url is not None, self.webhook is not None).count(True) != 1:
            raise ValueError("a channel has exactly one of console, url and webhook")
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("a channel has a secret or a secret_file, not both")
        has_secret = self.secret is not None or self.secret_file is not None
        if self.webhook is not None:
            _check_webhook(self.webhook.get_secret_value(), plain_allowed=self.allow_private)
            if not has_secret:
                raise ValueError("a webhook needs a secret or a secret_file to be signed with")
        if self.proxy is not None:
            _check_proxy(self.proxy.get_secret_value(), self.url is not None)
        if self.webhook is None and has_secret != (self.url is not None and SECRET in self.url.get_secret_value()):
            raise ValueError("a secret goes where the url says {secret}, and only there")
        return self

    def serves(self, group: str) -> bool:
        """Whether the approvers of this group are notified through it."""
        return "*" in self.groups or group in self.groups


def _check_proxy(address: str, has_url: bool) -> None:
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not has_url or not host or parts.scheme not in ("http", "https"):
        raise ValueError("a proxy is an http or https address and goes with a url")


def _check_webhook(address: str, *, plain_allowed: bool) -> None:
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme != "https" and not (plain_allowed and parts.scheme == "http"):
        raise ValueError("a webhook is an https address; plain http needs allow_private")
    if not host or not address.isascii() or not address.isprintable() or " " in address:
        raise ValueError("a webhook is a whole address in plain characters; international names have an xn-- form")
    if "@" in parts.netloc:
        raise ValueError("a webhook holds no user or password: its requests are signed")
