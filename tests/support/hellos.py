"""The first message of a TLS client."""

from __future__ import annotations

import ssl

import pytest


def client_hello(name: str | None) -> bytes:
    """What OpenSSL says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def with_extension(hello: bytes, extension: bytes, tail: bytes = b"") -> bytes:
    """A real hello with one extension more at its end, and something behind the extensions."""
    body = hello[9:]
    at = 34
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2])
    at += 1 + body[at]
    extensions = body[at + 2 :] + extension
    body = body[:at] + len(extensions).to_bytes(2) + extensions + tail
    message = b"\x01" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message


def in_records(hello: bytes, *sizes: int) -> bytes:
    """The same hello, spread over records of these sizes and one with the rest."""
    message, records = hello[5:], b""
    for size in (*sizes, len(message)):
        piece, message = message[:size], message[size:]
        records += b"\x16\x03\x01" + len(piece).to_bytes(2) + piece
    return records
