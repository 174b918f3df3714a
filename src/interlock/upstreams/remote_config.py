"""Configuration that the connectors share: TLS, credentials by name, headers, bounds of an answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self
from urllib.parse import quote, urlsplit

import pydantic

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.schema import Json
from interlock.upstreams.configuration import read_config
from interlock.upstreams.response_limits import MAX_BYTES, MAX_VALUES

if TYPE_CHECKING:
    import ssl

_CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})
_TOKEN = expression(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class ConfigPart(pydantic.BaseModel):
    """A piece of a configuration: closed, immutable."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def from_document(cls, document: Json) -> Self:
        """Read and check a configuration. Refuses with E3004 one that cannot be used."""
        return read_config(cls, document)


class Tls(ConfigPart):
    """The trusted authorities and our certificate. By default, the system's authorities and no certificate."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> Tls:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a certificate needs its private key: set both cert_file and key_file")
        return self

    def context(self) -> ssl.SSLContext:
        """Make a TLS context. It is costly: one for each connector, never one for each call."""
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError):
            raise Failure("E3108", "the upstream's ca_file, cert_file or key_file cannot be read") from None
        return context

    def read(self, which: Literal["ca_file", "cert_file", "key_file"]) -> bytes | None:
        """Read one of the files, for libraries that want its content."""
        path: Path | None = getattr(self, which)
        try:
            return None if path is None else path.read_bytes()
        except OSError:
            raise Failure("E3108", f"the upstream's {which} cannot be read") from None


class Lent(Protocol):
    """A holder of credentials: a call, or a look."""

    @property
    def credentials(self) -> Mapping[str, str]: ...


class Look(NamedTuple):
    """A look at an upstream, which belongs to no call."""

    credentials: Mapping[str, str]


class Auth(ConfigPart):
    """The way a credential is sent to the upstream. `secret` is its name in the secrets store, never its value."""

    kind: Literal["bearer", "header", "query", "basic"]
    secret: str = pydantic.Field(min_length=1)
    name: str = ""  # of the header or query parameter
    user: str = ""  # for basic, where the secret is only the password

    @pydantic.model_validator(mode="after")
    def _named(self) -> Auth:
        if (self.kind in ("header", "query")) != bool(self.name):
            raise ValueError("header and query need `name`, bearer and basic have none")
        if self.user and self.kind != "basic":
            raise ValueError("`user` is for basic only")
        return self

    def value(self, lent: Lent) -> str:
        """The credential on loan; E3602 if there is none."""
        value = lent.credentials.get(self.secret)
        if not value:
            raise Failure("E3602", f"the upstream asks for the credential `{self.secret}`: interlock secrets set")
        return value

    def header(self, lent: Lent) -> tuple[str, str] | None:
        """The header that carries it; None if the query does."""
        if self.kind == "query":
            return None
        value = self.value(lent)
        if self.kind == "basic":
            pair = f"{self.user}:{value}" if self.user else value
            return "authorization", "Basic " + base64.b64encode(pair.encode()).decode()
        if not value.isascii() or not value.isprintable():
            raise Failure("E3602", f"the credential `{self.secret}` cannot stand in a header; store it again")
        return ("authorization", f"Bearer {value}") if self.kind == "bearer" else (self.name.lower(), value)

    def query(self, lent: Lent) -> str:
        """The text to append to a query; empty if a header carries it."""
        return f"{quote(self.name, safe='')}={quote(self.value(lent), safe='')}" if self.kind == "query" else ""


class RemoteConfig(ConfigPart):
    """The configuration that all connectors share."""

    auth: Auth | None = None
    headers: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    tls: Tls = Tls.model_construct()
    allow_private: bool = False
    # Send the caller with each call (x-interlock-caller, x-interlock-agent). By default only on one's own networks.
    send_caller: bool | None = None
    idempotent: bool = False  # the upstream does a write only once under an idempotency key
    connect_timeout_s: float = pydantic.Field(5.0, gt=0, le=60)
    max_response_bytes: int = pydantic.Field(MAX_BYTES, ge=1, le=1_073_741_824)
    max_response_values: int = pydantic.Field(MAX_VALUES, ge=1, le=100_000_000)  # numbers, texts, lists and objects

    @property
    def sends_caller(self) -> bool:
        """Whether the upstream is sent the caller's id, which is personal data to a third party."""
        return self.allow_private if self.send_caller is None else self.send_caller

    @pydantic.field_validator("headers")
    @classmethod
    def _no_credentials(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name.lower() in _CREDENTIAL_HEADERS:
                raise ValueError(f"`{name}` would keep a credential in clear; name the secret in `auth`")
            header_safe(name, value)
        return {name.lower(): value for name, value in headers.items()}


def keep_hidden(config: RemoteConfig, *, plain: bool) -> None:
    """Refuse (ValueError) to send a credential over the internet in clear text."""
    if plain and config.auth is not None and not config.allow_private:
        raise ValueError("a credential is only sent under TLS, or on private networks that are allowed")


def checked_url(url: str, schemes: Sequence[str]) -> str:
    """Return an endpoint without its last slash; ValueError unless it is a plain address without credentials."""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(
            f"an endpoint begins with {' or '.join(f'{scheme}://' for scheme in schemes)} and names a host"
        )
    if "@" in parts.netloc:
        raise ValueError("an endpoint holds no user or password; name the secret in `auth`")
    if parts.fragment:
        raise ValueError("an endpoint has no fragment")
    _ = parts.port
    return url.rstrip("/")


def header_safe(name: str, value: str) -> None:
    """Refuse (ValueError) a header that would not stay one line."""
    if not _TOKEN.fullmatch(name) or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise ValueError(f"the header `{name}` cannot hold this")
