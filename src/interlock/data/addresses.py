"""Addresses and expressions as an operator writes them in the settings: each function checks the form of one.

A ValueError says how it is written. None of them holds a credential.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def database_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("a database is written postgresql://HOST/DATABASE")
    if parts.password is not None or "password=" in parts.query:
        raise ValueError("keep the password out of the settings: a passfile (PGPASSFILE) holds it")
    return value


def redis_address(value: str) -> str:
    parts = urlsplit(value)
    remote = parts.scheme in ("redis", "rediss") and parts.hostname
    if value and not remote and not (parts.scheme == "unix" and parts.path.startswith("/")):
        raise ValueError("a Redis server is written redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH")
    if parts.password is not None:
        raise ValueError("keep the password out of the settings: redis_secret names a stored one")
    return value


def engine_address(value: str) -> str:
    parts = urlsplit(value)
    grpc = parts.scheme in ("grpc", "grpcs")
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname or parts.username is not None:
        raise ValueError("an engine is written https://HOST/PATH or grpcs://HOST:PORT")
    if grpc and (parts.port is None or parts.path not in ("", "/") or parts.query):
        raise ValueError("a gRPC engine is written grpcs://HOST:PORT")
    return value


def encoder(value: str) -> str:
    kind, colon, rest = value.partition(":")
    if not colon or kind not in ("ollama", "openai"):
        if value in ("auto", "table", "package", "none") or "/" in value or "\\" in value:
            return value
        raise ValueError("write auto, table, package, none, a folder with a `/`, ollama:MODEL@URL or openai:MODEL@URL")
    model, _, url = rest.rpartition("@")
    parts = urlsplit(url)
    if not model or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"a service is written {kind}:MODEL@https://HOST")
    if "@" in parts.netloc or re.search(r"://[^/]*@", rest):
        raise ValueError("keep credentials out of the settings: search_encoder_secret names a stored one")
    return value


def backup_place(value: Any) -> Any:
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and not value.startswith(("/", "s3://")):
        raise ValueError("write the whole path, beginning with /, or s3://BUCKET/PREFIX")
    return value


def chat_model(value: str) -> str:
    if not value:
        return value
    if not value.startswith("openai:"):
        raise ValueError("a model is written openai:MODEL@https://HOST")
    return encoder(value)


ENCRYPTED = {"http": "an https", "redis": "a rediss"}


def is_here(host: str) -> bool:
    """Whether a host name is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def expression(value: str) -> str:
    try:
        expression = re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    if expression.match(""):
        raise ValueError("it matches the empty text, so it would match everywhere")
    return value
