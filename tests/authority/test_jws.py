"""Signatures of tokens against PyJWT: each accepts what the other signed, and nothing that was changed since."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest

from interlock.authority import jws
from interlock.authority.keys import ALGORITHMS, Algorithm, PublicKey, load_private, make_private, to_pem
from interlock.core.errors import Failure

CLAIMS = {"iss": "somebody", "sub": "bot", "exp": 4_000_000_000, "name": "Zoë", "tools": [{"tool_id": "demo.*"}]}


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _wrong(signature: bytes) -> Iterator[bytes]:
    """Signatures that are near the right one, and such as a careless check might accept."""
    for place in (0, len(signature) // 2, len(signature) - 1):
        yield signature[:place] + bytes([signature[place] ^ 1]) + signature[place + 1 :]
    half = len(signature) // 2
    yield from (b"", signature[:-1], signature + b"\0", b"\0" + signature, signature[half:] + signature[:half])
    yield from (bytes(len(signature)), b"\xff" * len(signature), bytes(half) + signature[half:])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tokens_are_signed_and_checked_as_pyjwt_does_it(algorithm: Algorithm) -> None:
    private = make_private(algorithm)
    key = PublicKey("one", algorithm, private.public_key())
    ours = jws.sign(CLAIMS, private, "one")
    assert jwt.decode(ours, key.key, [algorithm]) == CLAIMS
    assert jwt.get_unverified_header(ours) == {"typ": "JWT", "alg": algorithm, "kid": "one"}
    theirs = jwt.encode(CLAIMS, private, algorithm, {"kid": "one"})
    assert ours.rpartition(".")[0] == theirs.rpartition(".")[0]
    for token in (ours, theirs):
        opened = jws.take_apart(token)
        jws.verify(token, opened, key)
        assert opened.claims == CLAIMS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signature_that_is_not_that_of_the_key_and_the_text_is_refused(algorithm: Algorithm) -> None:
    private = make_private(algorithm)
    key = PublicKey("one", algorithm, private.public_key())
    token = jws.sign(CLAIMS, private, None)
    signed, _, signature = token.rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    other = PublicKey("other", algorithm, make_private(algorithm).public_key())
    changed = jws.sign({**CLAIMS, "sub": "boss"}, private, None).rpartition(".")[0]
    tries = [(f"{signed}.{_text(one)}", key) for one in _wrong(raw)]
    for forged, under in [*tries, (token, other), (f"{changed}.{signature}", key), (f"{signed}.{signature}=", key)]:
        with pytest.raises(Failure, match="signature is wrong") as refused:
            jws.verify(forged, jws.take_apart(token), under)
        assert refused.value.code == "E3202"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_checks_the_one_algorithm_that_it_is_for(algorithm: Algorithm) -> None:
    token = jws.sign(CLAIMS, make_private(algorithm), None)
    opened = jws.take_apart(token)
    for name in set(ALGORITHMS) - {algorithm}:
        with pytest.raises(Failure, match=f"its key is for {name} only"):
            jws.verify(token, opened, PublicKey("k", name, make_private(name).public_key()))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signing_key_is_read_where_the_library_has_no_binding_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm
) -> None:
    path, private = tmp_path / "key.pem", make_private(algorithm)
    path.touch(mode=0o600)
    path.write_bytes(to_pem(private))
    read = [to_pem(load_private(path))]
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.bindings._rust", None)
    read.append(to_pem(load_private(path)))
    assert read == [to_pem(private)] * 2
