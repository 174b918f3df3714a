"""DIDs: the key behind the name, whichever way the name holds it, and no way to be led astray."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from interlock.authority.delegation import delegate_offline
from interlock.authority.dids import DidResolver, keys_within, make_did_key, read_document, to_multibase, web_address
from interlock.authority.identities import Identity
from interlock.authority.keys import PublicKey, make_private, to_jwk
from interlock.authority.trusted_issuers import fetch_json
from interlock.core.errors import Failure
from interlock.testing import FakeClock
from tests.support.identities import HELPER, private_key
from tests.support.tokens import World, parts, sign, site
from tests.support.tokens import world as world

# Published by the did:key specification.
VECTORS = [
    ("did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK", "EdDSA"),
    ("did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp", "EdDSA"),
    ("did:key:zDnaerDaTF5BXEavCrfRZEk316dpbLsfPDZ3WJ5hRTPFU2169", "ES256"),
    ("did:key:zDnaerx9CtbPJ1q36T5Ln5wYt3MQYeGRG5ehnPAmxcf5mDZpv", "ES256"),
]


def held(did: str) -> PublicKey:
    """The one key within a DID."""
    keys = keys_within(did)
    assert keys is not None
    (key,) = keys
    return key


@pytest.mark.parametrize(("did", "algorithm"), VECTORS)
def test_published_dids_hold_the_keys_they_are_said_to(did: str, algorithm: str) -> None:
    key = held(did)
    assert key.algorithm == algorithm
    assert make_did_key(key.key) == did


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256", "RS256"])
def test_a_key_survives_being_a_did(algorithm: Any) -> None:
    public = private_key("any", algorithm).public_key()
    by_key = held(make_did_key(public))
    assert (by_key.key, by_key.algorithm) == (public, algorithm)
    encoded = base64.urlsafe_b64encode(json.dumps(to_jwk(public)).encode()).rstrip(b"=").decode()
    by_jwk = held(f"did:jwk:{encoded}")
    assert (by_jwk.key, by_jwk.algorithm) == (public, algorithm)


def _jwk_did(document: Any) -> str:
    return f"did:jwk:{base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b'=').decode()}"


def _weak() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1()).public_key()


@pytest.mark.parametrize(
    "did",
    [
        "alice",
        "did:key:",
        "did:key:z",
        "did:key:z6Mk",
        "did:key:Z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK",
        "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2do0",
        "did:key:z16MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK",
        "did:key:z6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc",
        f"did:key:z{'1' * 1500}",
        "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK#z6Mk",
        "did:unheard:of",
        "did:jwk:e30",
        "did:jwk:_",
        _jwk_did({"kty": "oct", "k": "c2VjcmV0"}),
        _jwk_did({"kty": "OKP", "crv": "X25519", "x": "c2VjcmV0"}),
        _jwk_did({"kty": "OKP", "crv": "Ed25519", "x": 5}),
        _jwk_did({**to_jwk(private_key("any").public_key()), "d": "c2VjcmV0"}),
        _jwk_did({**to_jwk(private_key("any").public_key()), "use": "enc"}),
        _jwk_did({**to_jwk(private_key("any").public_key()), "alg": "RS256"}),
    ],
)
def test_what_holds_no_key_of_ours_is_refused(did: str) -> None:
    with pytest.raises(Failure) as refused:
        keys_within(did)
    assert refused.value.code == "E3202"


@pytest.mark.parametrize("weak", [_weak, lambda: make_private("EdDSA").private_bytes_raw()])
def test_keys_of_other_types_get_no_did(weak: Any) -> None:
    with pytest.raises(Failure) as refused:
        make_did_key(weak())
    assert refused.value.code == "E3202"


# did:web


@pytest.mark.parametrize(
    ("did", "url"),
    [
        ("did:web:example.com", "https://example.com/.well-known/did.json"),
        ("did:web:example.com:agents:a1", "https://example.com/agents/a1/did.json"),
        ("did:web:example.com%3A8443", "https://example.com:8443/.well-known/did.json"),
        ("did:web:127.0.0.1%3A80", "https://127.0.0.1:80/.well-known/did.json"),
    ],
)
def test_a_did_web_says_where_its_document_is(did: str, url: str) -> None:
    assert web_address(did) == url


@pytest.mark.parametrize(
    "did",
    [
        "did:web:example.com:..:x",
        "did:web:example.com:.:x",
        "did:web:example.com%2Fx",
        "did:web:example.com%40evil.example",
        "did:web:example.com:a%2Fb",
        "did:web:example.com%3Fx",
        "did:web:EXAMPLE.com",
        "did:web:",
        "did:web:a::b",
    ],
)
def test_a_did_web_that_leads_astray_is_refused(did: str) -> None:
    with pytest.raises(Failure) as refused:
        web_address(did)
    assert refused.value.code == "E3202"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "[::1]", "[::]", "[fd00::1]", "[::ffff:127.0.0.1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]",
    ],
)  # fmt: skip
async def test_documents_of_strangers_are_not_fetched_from_within(host: str) -> None:
    with pytest.raises(Failure) as refused:
        await fetch_json(f"https://{host}/did.json", public_only=True)
    assert refused.value.code == "E3001"


def document(did: str, **changes: Any) -> dict[str, Any]:
    method = {"id": f"{did}#1", "controller": did, "publicKeyJwk": to_jwk(private_key("web").public_key())}
    return {"id": did, "verificationMethod": [method], "assertionMethod": [f"{did}#1"], **changes}


def test_only_keys_that_a_document_offers_for_delegating_or_asserting_count() -> None:
    did, public = "did:web:example.com", private_key("web").public_key()
    (key,) = read_document(did, document(did))
    assert (key.kid, key.key) == (f"{did}#1", public)
    embedded = {"id": "#2", "publicKeyMultibase": to_multibase(public)}
    (inline,) = read_document(did, document(did, assertionMethod=[], capabilityDelegation=[embedded]))
    assert inline.kid == f"{did}#2"
    others: list[dict[str, Any]] = [
        document(did, assertionMethod=[], keyAgreement=[f"{did}#1"]),
        document(did, assertionMethod=[f"{did}#9", 7, None]),
        document(did, assertionMethod=[{**embedded, "id": "did:web:other.example#1"}]),
        document(did, assertionMethod=[{**embedded, "controller": "did:web:other.example"}]),
        document(did, assertionMethod=[{**embedded, "publicKeyMultibase": "z"}]),
        document(did, assertionMethod="all"),
    ]
    for other in others:
        assert read_document(did, other) == ()
    foreigners: list[Any] = [document("did:web:other.example"), [], None]
    for foreign in foreigners:
        with pytest.raises(Failure) as refused:
            read_document(did, foreign)
        assert refused.value.code == "E3202"


async def test_a_holder_with_a_did_web_passes_his_token_on(world: World) -> None:
    with site() as served:
        did = f"did:web:127.0.0.1%3A{served.url.rpartition(':')[2]}:agents:a1"
        served.documents["/agents/a1/did.json"] = json.dumps(document(did)).encode()
        await world.identities.register(Identity(did=did, name="web"), by="operator")
        token = await world.issue(subject=did)
        below = delegate_offline(token, private=private_key("web"), subject=HELPER, clock=world.clock.clock)
        assert (await world.tokens.verifier.verify(below)).agent == HELPER
        forged = delegate_offline(token, private=private_key("mallory"), subject=HELPER, clock=world.clock.clock)
        assert await world.refusal(forged) == "E3202"
        assert served.asked == 1


async def test_nobody_unknown_makes_us_fetch_anything(world: World) -> None:
    with site() as served:
        did = f"did:web:127.0.0.1%3A{served.url.rpartition(':')[2]}"
        served.documents["/.well-known/did.json"] = json.dumps(document(did)).encode()
        header, claims = parts(await world.issue(user=None))
        unproven = sign(header, claims | {"sub": did}, private_key("mallory", "RS256"))
        below = delegate_offline(unproven, private=private_key("web"), subject=HELPER, clock=world.clock.clock)
        assert await world.refusal(below) == "E3202"
        assert served.asked == 0


async def test_a_document_that_is_not_to_be_had_fails_closed() -> None:
    clock = FakeClock()
    with site() as served:
        did = f"did:web:127.0.0.1%3A{served.url.rpartition(':')[2]}"
        resolver = DidResolver(clock=clock.clock, loopback_http=True)
        with pytest.raises(Failure) as missing:
            await resolver.resolve(did)
        assert missing.value.code == "E3001"
        served.documents["/.well-known/did.json"] = json.dumps(document(did)).encode()
        clock.advance(30)
        assert [key.algorithm for key in await resolver.resolve(did)] == ["EdDSA"]
        # Without the word of a test, a name that leads to this machine leads nowhere.
        with pytest.raises(Failure) as inside:
            await DidResolver(clock=clock.clock).resolve(did)
        assert inside.value.code == "E3001"
