"""Tokens against all that is known to be tried with tokens: only the good one passes, each other has its code."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt import algorithms

from interlock.authority.identities import DidRegistry, Identity
from interlock.authority.jws import LARGEST
from interlock.authority.keys import (
    ALGORITHMS,
    IssuerKeys,
    PublicKey,
    algorithm_of,
    from_jwk,
    make_private,
    thumbprint,
    to_jwk,
)
from interlock.authority.tokens import Tokens
from interlock.authority.trusted_issuers import FetchedKeys, TrustedIssuer, TrustedIssuers
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.testing import FakeClock
from tests.support.identities import AGENT, HELPER, OPERATOR, USER, did_of, private_key
from tests.support.stores import contents, notice
from tests.support.tokens import World, opened, part, parts, sign, site
from tests.support.tokens import world as world

Json = dict[str, Any]


# The good one


@pytest.mark.parametrize("algorithm", ["RS256", "EdDSA", "ES256"])
@pytest.mark.proves("AUTH-01")
async def test_a_good_token_speaks_for_the_user_through_the_agent(tmp_path: Path, algorithm: str) -> None:
    async with opened(tmp_path / "home", algorithm) as world:
        token = await world.issue(tools=[ToolGrant("demo.*", "^1.0.0")], constraints={"max_uses": 3})
        header, claims = parts(token)
        assert header == {"alg": algorithm, "typ": "JWT", "kid": world.keys.active().kid}
        assert claims["sub"] == AGENT
        assert claims["tools"] == [{"tool_id": "demo.*", "version_range": "^1.0.0"}]
        assert claims["act"]["sub"] == USER
        caller = await world.tokens.verifier.verify(token)
        assert (caller.id, caller.agent, caller.kind) == (USER, AGENT, "agent")
        assert (caller.trust, caller.groups, caller.tenant) == (40, {"staff"}, "local")
        assert caller.scopes == {"a:read", "a:write"}
        assert caller.capability is not None
        assert caller.capability.covers("demo.add", "1.5.0")
        assert caller.capability.leaf.constraints == {"max_uses": 3}
        assert world.tokens.verifier.known(token) is caller
        world.tokens.verifier.check(caller.capability)


class Waiting:
    """A registry that answers when it may, and counts who asks for the agent."""

    def __init__(self) -> None:
        self.registry: DidRegistry | None = None
        self.may = asyncio.Event()
        self.asked = 0
        self.was_asked = asyncio.Event()

    async def look_up(self, did: str) -> Identity | None:
        if did == AGENT:
            self.asked += 1
            self.was_asked.set()
            await self.may.wait()
        assert self.registry is not None
        return await self.registry.look_up(did)


async def test_requests_that_come_together_with_one_token_verify_it_once(tmp_path: Path) -> None:
    slow = Waiting()
    async with opened(tmp_path / "home", registry=slow) as world:
        slow.registry = world.identities
        slow.may.set()
        token = await world.issue()
        verify = world.tokens.verifier.verify
        slow.may.clear()
        slow.was_asked.clear()
        slow.asked = 0
        asking = [asyncio.ensure_future(verify(token)) for _ in range(20)]
        await slow.was_asked.wait()
        # The one who came first goes, and the others are served.
        asking[0].cancel()
        slow.may.set()
        callers = {id(await one): await one for one in asking[1:]}
        assert asking[0].cancelled()
        assert slow.asked == len(callers) == 1
        # A token that is revoked meanwhile serves nobody, and who asks after that is not told what was found before.
        world.clock.advance(61)
        slow.may.clear()
        slow.was_asked.clear()
        early = asyncio.ensure_future(verify(token))
        await slow.was_asked.wait()
        (caller,) = callers.values()
        assert caller.capability is not None
        await world.tokens.revoke(caller.capability.leaf.jti, by=OPERATOR, reason="lost")
        late = asyncio.ensure_future(verify(token))
        slow.may.set()
        for one in (early, late):
            with pytest.raises(Failure) as refused:
                await one
            assert refused.value.code == "E3201"


async def test_a_person_with_a_token_of_his_own_acts_for_himself(world: World) -> None:
    caller = await world.tokens.verifier.verify(await world.issue(subject=USER, user=None))
    assert (caller.id, caller.agent, caller.acting) == (USER, None, USER)


async def test_what_is_issued_is_on_record_and_the_token_is_not(world: World) -> None:
    token = await world.issue()
    (issued,) = [act for act in world.acts() if act["act"] == "token.issued"]
    assert (issued["call"], issued["subject"], issued["by"]) == (parts(token)[1]["jti"], AGENT, OPERATOR.id)
    everything = contents(world.home)
    assert token.rpartition(".")[2].encode() not in everything


# The corpus


def _with(world: World, token: str, private: Any = None, *, header: Json | None = None, **claims: Any) -> str:
    """The token with some of it changed, properly signed. A value of `...` leaves it out."""
    was_header, was_claims = parts(token)
    changed = {name: value for name, value in (was_claims | claims).items() if value is not ...}
    named = {name: value for name, value in (was_header | (header or {})).items() if value is not ...}
    return sign(named, changed, private or world.keys.active().private)


@pytest.mark.proves("AUTH-01")
async def test_an_unsigned_token_is_refused(world: World) -> None:
    header, claims = parts(await world.issue())
    for name in ("none", "None", "NONE", "nOnE", ""):
        for end in ("", part(b"x")):
            forged = f"{part(header | {'alg': name})}.{part(claims)}.{end}"
            assert await world.refusal(forged) == "E3202"


@pytest.mark.proves("AUTH-01")
async def test_a_public_key_is_no_shared_secret(world: World) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    header, claims = parts(await world.issue())
    public = world.keys.active().public.key
    for encoding in (Encoding.PEM, Encoding.DER):
        secret = public.public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
        for name, digest in (("HS256", hashlib.sha256), ("HS512", hashlib.sha512)):
            signed = f"{part(header | {'alg': name})}.{part(claims)}"
            forged = f"{signed}.{part(hmac.new(secret, signed.encode(), digest).digest())}"
            assert await world.refusal(forged) == "E3202"


@pytest.mark.proves("AUTH-01")
@pytest.mark.parametrize("algorithm", ["RS256", "EdDSA", "ES256"])
async def test_a_key_verifies_no_algorithm_but_its_own(tmp_path: Path, algorithm: str) -> None:
    async with opened(tmp_path / "home", algorithm) as world:
        token = await world.issue()
        for name in {*NAMED_ALGORITHMS} - {algorithm}:
            assert await world.refusal(_with(world, token, header={"alg": name})) == "E3202", name
        for kind in ("RS256", "EdDSA", "ES256"):
            other = private_key("mallory", kind)
            for name in ("RS256", "EdDSA", "ES256"):
                assert await world.refusal(_with(world, token, other, header={"alg": name})) == "E3202", (kind, name)


NAMED_ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "ES256K", "EdDSA", "Ed25519",
    "Ed448", "HS256", "HS384", "HS512", "none", "rs256", "eddsa", "es256", "",
)  # fmt: skip


@pytest.mark.parametrize("name", ["RS384", "RS512", "PS256", "PS384", "PS512"])
@pytest.mark.proves("AUTH-01")
async def test_the_issuers_own_key_signs_under_no_other_name(world: World, name: str) -> None:
    header, claims = parts(await world.issue())
    signed = f"{part(header | {'alg': name})}.{part(claims)}"
    signature = jwt.get_algorithm_by_name(name).sign(signed.encode(), world.keys.active().private)
    assert await world.refusal(f"{signed}.{part(signature)}") == "E3202"


def _weak(kind: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa

    made: dict[str, Callable[[], Any]] = {
        "RSA-1024": lambda: rsa.generate_private_key(public_exponent=65537, key_size=1024),
        "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
        "Ed448": ed448.Ed448PrivateKey.generate,
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["RSA-1024", "P-384", "secp256k1", "Ed448"])
@pytest.mark.proves("AUTH-01")
def test_a_key_of_any_other_type_verifies_nothing(kind: str) -> None:
    with pytest.raises(Failure) as refused:
        algorithm_of(_weak(kind).public_key())
    assert refused.value.code == "E3202"


@pytest.mark.proves("AUTH-01")
async def test_a_header_cannot_bring_its_own_key(world: World) -> None:
    mallory = private_key("mallory", "RS256")
    token = await world.issue()
    jwk = {**to_jwk(mallory.public_key()), "kid": "m"}
    for steering in (
        {"jwk": jwk},
        {"jku": "https://mallory.example/keys"},
        {"x5u": "https://mallory.example/cert"},
        {"x5c": ["MIIB"]},
        {"crit": ["exp"]},
        {"b64": False, "crit": ["b64"]},
        {"zip": "DEF"},
    ):
        # Whoever signs it, also with the right key.
        assert await world.refusal(_with(world, token, mallory, header=steering)) == "E3202"
        assert await world.refusal(_with(world, token, header=steering)) == "E3202"


@pytest.mark.parametrize(
    "kid",
    [..., "", "../../keys/journal.ed25519", "/dev/null", "' OR 1=1 --", "a\0b", "other", AGENT, f"{AGENT}#0"],
    ids=["none", "empty", "a path", "a device", "a query", "a nul", "another's", "a DID", "a key of a DID"],
)
@pytest.mark.proves("AUTH-01")
async def test_a_kid_is_a_name_in_a_table_and_nothing_else(world: World, kid: Any) -> None:
    assert await world.refusal(_with(world, await world.issue(), header={"kid": kid})) == "E3202"


@pytest.mark.proves("AUTH-01")
async def test_a_token_counts_between_its_times_to_the_millisecond(world: World) -> None:
    token = await world.issue(ttl_s=60)
    caller = await world.tokens.verifier.verify(token)
    assert caller.capability is not None
    world.clock.advance(59.999)
    assert (await world.tokens.verifier.verify(token)).id == USER
    world.clock.advance(0.001)
    assert await world.refusal(token) == "E3201"
    with pytest.raises(Failure) as expired:
        world.tokens.verifier.check(caller.capability)
    assert expired.value.code == "E3201"


@pytest.mark.proves("AUTH-01")
async def test_a_token_from_the_future_is_refused(world: World) -> None:
    token = await world.issue()
    now_s = world.clock.now_ms // 1000
    assert await world.refusal(_with(world, token, nbf=now_s + 1)) == "E3201"
    assert await world.refusal(_with(world, token, iat=now_s + 1)) == "E3201"


@pytest.mark.proves("AUTH-01")
async def test_a_tampered_token_is_refused(world: World) -> None:
    token = await world.issue()
    header, claims, signature = token.split(".")
    more = part(parts(token)[1] | {"scopes": ["a:read", "a:write", "admin"]})
    flipped = signature[:-9] + ("A" if signature[-9] != "A" else "B") + signature[-8:]
    for forged in (f"{header}.{more}.{signature}", f"{header}.{claims}.{flipped}", f"{header}.{claims}."):
        assert await world.refusal(forged) == "E3202"
    assert await world.refusal(sign(*parts(token), private_key("mallory", "RS256"))) == "E3202"


CLAIMS = ["iss", "aud", "sub", "iat", "nbf", "exp", "jti", "tools"]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.proves("AUTH-01")
async def test_every_claim_is_needed_and_of_its_own_type(world: World, claim: str) -> None:
    token = await world.issue()
    wrong: list[Any] = [..., None, {}, True, 1.5, "", "é"]
    for value in wrong:
        code = await world.refusal(_with(world, token, header=None, **{claim: value}))
        assert code == ("E3202" if claim == "iss" and value in ("", "é") else "E3203"), value


@pytest.mark.parametrize(
    "change",
    [
        {"aud": "another"},
        {"aud": "Interlock"},
        {"aud": ["interlock", "another"]},
        {"sub": "alice"},
        {"scopes": ["A:read"]},
        {"scopes": ["а:read"]},
        {"tools": [{"tool_id": "Demo.add", "version_range": "*"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "＊"}]},
        {"constraints": {"max_luck": 1}},
        {"exp": 4_000_000_000},
        {"proof": "x"},
        {"act": "x"},
    ],
)
@pytest.mark.proves("AUTH-01")
async def test_claims_that_say_something_else_are_refused(world: World, change: Json) -> None:
    assert await world.refusal(_with(world, await world.issue(), **change)) == "E3203"


@pytest.mark.proves("AUTH-01")
async def test_what_is_said_twice_is_refused(world: World) -> None:
    token = await world.issue()
    header, claims = (json.dumps(one) for one in parts(token))
    key = world.keys.active().private
    assert await world.refusal(sign(header.encode(), f'{{"sub": "{USER}", {claims[1:]}'.encode(), key)) == "E3203"
    assert await world.refusal(sign(f'{{"alg": "none", {header[1:]}'.encode(), claims.encode(), key)) == "E3203"
    inner = claims.replace('"act": {', f'"act": {{"sub": "{AGENT}", ', 1)
    assert await world.refusal(sign(header.encode(), inner.encode(), key)) == "E3203"


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        ".",
        "..",
        "a.b",
        "a.b.c.d",
        "Bearer x.y.z",
        "eyJ.eyJ.x",
        "x" * (LARGEST + 1),
        f"{part([1])}.{part({})}.x",
        f"{part({'alg': 'RS256', 'typ': 'JWE', 'kid': 'k'})}.{part({'iss': 'interlock'})}.x",
        f"{part({'alg': 'RS256', 'typ': 'JWT', 'kid': 7})}.{part({'iss': 'interlock'})}.x",
        f"{part(b'[' * 9000)}.{part({})}.x",
        f"{part({})}=.{part({})}.x",
        "ey\ud800.x.y",
        "é.é.é",
    ],
)
@pytest.mark.proves("AUTH-01")
async def test_what_is_no_token_is_malformed(world: World, garbage: str) -> None:
    assert await world.refusal(garbage) == "E3203"


async def test_spare_bits_of_base64_are_no_second_spelling(world: World) -> None:
    header, claims = parts(await world.issue())
    claims["pad"] = "x" * (-len(json.dumps(claims | {"pad": ""})) % 3 + 1)
    token = sign(header, claims, world.keys.active().private)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    middle = token.split(".")[1]
    assert len(middle) % 4 != 0
    other = middle[:-1] + alphabet[alphabet.index(middle[-1]) ^ 1]
    assert await world.refusal(token.replace(middle, other)) == "E3203"


# Keys


async def test_older_keys_verify_until_they_are_retired(world: World) -> None:
    old, first = await world.issue(), world.keys.active()
    second = await world.tokens.rotate_key("EdDSA", by=OPERATOR)
    new = await world.issue()
    assert parts(new)[0]["kid"] == second.kid
    caller = await world.tokens.verifier.verify(old)
    with pytest.raises(Failure) as signing:
        await world.tokens.retire_key(second.kid, reason="old", by=OPERATOR)
    assert signing.value.code == "E3411"
    await world.tokens.retire_key(first.kid, reason="old", by=OPERATOR)
    assert world.tokens.verifier.known(old) is None
    assert await world.refusal(old) == "E3202"
    assert caller.capability is not None
    with pytest.raises(Failure) as void:
        world.tokens.verifier.check(caller.capability)
    assert void.value.code == "E3201"
    assert (await world.tokens.verifier.verify(new)).agent == AGENT
    assert [key["kid"] for key in world.keys.jwks()["keys"]] == [second.kid]


async def test_revoking_the_key_that_signs_puts_another_in_its_place(world: World) -> None:
    old, first = await world.issue(), world.keys.active()
    await world.tokens.revoke(first.kid, reason="it leaked", by=OPERATOR)
    assert await world.refusal(old) == "E3202"
    assert world.keys.active().kid != first.kid
    assert (await world.tokens.verifier.verify(await world.issue())).agent == AGENT


def test_no_key_has_a_name_that_a_command_line_takes_for_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(dashed: bool) -> Any:
        made = (make_private("EdDSA") for _ in itertools.count())
        return next(key for key in made if thumbprint(key.public_key()).startswith("-") is dashed)

    drawn = [named(False), named(True), named(True)]

    def draw(_: str) -> Any:
        return drawn.pop()

    monkeypatch.setattr("interlock.authority.keys.make_private", draw)
    assert not IssuerKeys(tmp_path / "issuer", clock=FakeClock().clock).init("EdDSA").kid.startswith("-")
    assert not drawn


def test_a_key_that_others_can_read_or_that_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    keys = IssuerKeys(tmp_path / "issuer", clock=FakeClock().clock)
    first, second = keys.init("EdDSA"), keys.rotate()
    assert keys.active().kid == second.kid == thumbprint(second.public.key)
    paths = sorted((tmp_path / "issuer").iterdir())
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    fresh = functools.partial(IssuerKeys, tmp_path / "issuer", clock=FakeClock().clock)
    paths[0].chmod(0o640)
    with pytest.raises(Failure) as loose:
        fresh().all()
    assert loose.value.code == "E3804"
    paths[0].chmod(0o600)
    shutil.copyfile(paths[0], paths[1])
    with pytest.raises(Failure) as swapped:
        fresh().all()
    assert swapped.value.code == "E3804"
    with pytest.raises(Failure) as again:
        keys.init("EdDSA")
    assert again.value.code == "E3411"
    assert first.kid not in str(again.value)


# Other issuers


FOREIGN = {"iss": "https://id.example", "audience": "tools", "algorithms": ["RS256"]}


def foreign_token(world: World, private: Any, kid: str = "f1", **claims: Any) -> str:
    now_s = world.clock.now_ms // 1000
    stated: Json = {
        "iss": FOREIGN["iss"],
        "aud": FOREIGN["audience"],
        "sub": AGENT,
        "iat": now_s,
        "nbf": now_s,
        "exp": now_s + 60,
        "jti": "foreign-1",
        "tools": [{"tool_id": "*", "version_range": "*"}],
    }
    return sign({"alg": "RS256", "typ": "at+jwt", "kid": kid, "x5t": "abc"}, stated | claims, private)


def jwks_of(**keys: Any) -> Json:
    return {"keys": [{**to_jwk(key.public_key()), "kid": kid} for kid, key in keys.items()]}


async def test_another_issuer_is_trusted_by_name_audience_algorithm_and_key(tmp_path: Path) -> None:
    private, jwks = private_key("foreign", "RS256"), tmp_path / "jwks.json"
    jwks.write_text(json.dumps(jwks_of(f1=private, f2=private_key("foreign"))))
    trusted = TrustedIssuers([TrustedIssuer.read({**FOREIGN, "jwks": str(jwks)})], clock=FakeClock().clock)
    async with opened(tmp_path / "home", trusted=trusted) as world:
        good = foreign_token(world, private)
        caller = await world.tokens.verifier.verify(good)
        assert (caller.id, caller.agent) == (AGENT, AGENT)
        assert caller.capability is not None
        assert caller.capability.issuer == FOREIGN["iss"]
        for bad in (
            foreign_token(world, private, iss="https://mallory.example"),
            foreign_token(world, private, iss="interlock", aud="interlock"),
            foreign_token(world, private_key("mallory", "RS256")),
            foreign_token(world, private, kid="f9"),
            foreign_token(world, private, kid=world.keys.active().kid),
            # Its key is in the set, but not its algorithm among those allowed.
            _with(world, good, private_key("foreign"), header={"kid": "f2", "alg": "EdDSA"}),
            # Our own key does not speak for it.
            _with(world, good, header={"kid": world.keys.active().kid}),
        ):
            assert await world.refusal(bad) == "E3202"
        assert await world.refusal(foreign_token(world, private, aud="interlock")) == "E3203"
        # A key set is read again when it changes, and one that is gone or broken verifies nothing.
        jwks.write_text(json.dumps(jwks_of(f3=private)))
        assert await world.refusal(foreign_token(world, private, jti="x")) == "E3202"
        assert (await world.tokens.verifier.verify(foreign_token(world, private, kid="f3"))).id == AGENT
        await world.tokens.revoke(f"{FOREIGN['iss']}#f3", reason="told so", by=OPERATOR)
        assert await world.refusal(foreign_token(world, private, kid="f3")) == "E3201"
        jwks.write_text("{")
        assert await world.refusal(foreign_token(world, private, kid="f3")) == "E3001"


async def test_claims_that_are_not_understood_are_refused_whoever_signed_the_token(tmp_path: Path) -> None:
    private, jwks = private_key("foreign", "RS256"), tmp_path / "jwks.json"
    jwks.write_text(json.dumps(jwks_of(f1=private)))
    entry = {**FOREIGN, "jwks": str(jwks), "ignored_claims": ["realm_access"]}
    trusted = TrustedIssuers([TrustedIssuer.read(entry)], clock=FakeClock().clock)
    async with opened(tmp_path / "home", trusted=trusted) as world:
        informing: Json = {
            "name": "Ann",
            "email": "a@example.org",
            "azp": "x",
            "auth_time": 1,
            "realm_access": {"roles": []},
        }
        assert (await world.tokens.verifier.verify(foreign_token(world, private, **informing))).id == AGENT
        ours = await world.issue()
        for claim in ("cnf", "may_act", "authorization_details", "scope", "proof", "anything"):
            stated: Json = {claim: {"jkt": "x"}}
            assert await world.refusal(foreign_token(world, private, **stated)) == "E3203", claim
            assert await world.refusal(_with(world, ours, **stated)) == "E3203", claim
        # What only informs is not ours to send.
        assert await world.refusal(_with(world, ours, name="Ann")) == "E3203"


@pytest.mark.parametrize("ignored", ["cnf", ["cnf"], ["may_act", "name"], [1], {"scope": True}])
def test_a_claim_that_restricts_a_token_cannot_be_ignored(ignored: Any) -> None:
    with pytest.raises(Failure) as refused:
        TrustedIssuer.read({**FOREIGN, "jwks": "x", "ignored_claims": ignored})
    assert refused.value.code == "E3108"


async def test_a_known_key_does_not_wait_while_an_unknown_one_is_fetched() -> None:
    clock, begun, gate, times = FakeClock(), asyncio.Event(), asyncio.Event(), 0
    known = PublicKey("f1", "RS256", None)

    async def fetch() -> tuple[PublicKey, ...]:
        nonlocal times
        times += 1
        if times > 1:
            begun.set()
            await gate.wait()
        return (known,)

    keys = FetchedKeys(fetch, clock.clock)
    assert await keys.keys("f1") == (known,)
    clock.advance(301)  # grown old, too
    unknown = asyncio.ensure_future(keys.keys("f9"))
    await begun.wait()
    async with asyncio.timeout(60):
        assert await keys.keys("f1") == (known,)
    assert not unknown.done()
    gate.set()
    assert await unknown == (known,)


async def test_a_caller_that_stops_waiting_does_not_cut_the_fetch_off_for_others() -> None:
    begun, gate, times = asyncio.Event(), asyncio.Event(), 0
    key = PublicKey("f1", "RS256", None)

    async def fetch() -> tuple[PublicKey, ...]:
        nonlocal times
        times += 1
        begun.set()
        await gate.wait()
        return (key,)

    keys = FetchedKeys(fetch, FakeClock().clock)
    impatient, patient = (asyncio.ensure_future(keys.keys("f1")) for _ in range(2))
    await begun.wait()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    gate.set()
    assert await patient == await keys.keys("f1") == (key,)
    assert times == 1


async def test_a_fetched_key_set_is_kept_refetched_sparingly_and_never_replaced_by_rubbish(tmp_path: Path) -> None:
    private, clock = private_key("foreign", "RS256"), FakeClock()
    with site() as served:
        served.documents["/jwks"] = json.dumps(jwks_of(f1=private)).encode()
        issuer = TrustedIssuer.read({**FOREIGN, "jwks": f"{served.url}/jwks"})
        trusted = TrustedIssuers([issuer], clock=clock.clock, loopback_http=True)
        assert await trusted.find(issuer.iss, "f1") is not None
        assert await trusted.find(issuer.iss, "f1") is not None
        assert served.asked == 1
        served.documents["/jwks"] = json.dumps(jwks_of(f2=private)).encode()
        assert await trusted.find(issuer.iss, "f2") is None
        assert served.asked == 1
        clock.advance(30)
        assert await trusted.find(issuer.iss, "f2") is not None
        assert await trusted.find(issuer.iss, "f1") is None
        assert served.asked == 2
        for status, body in ((500, b"{}"), (302, b"{}"), (200, b"<html>"), (200, b" " * 70_000), (200, b'{"keys": 1}')):
            clock.advance(301)
            served.status, served.documents["/jwks"] = status, body
            assert await trusted.find(issuer.iss, "f2") is not None
        assert served.asked == 7
        clock.advance(3601)
        with pytest.raises(Failure) as gone:
            await trusted.find(issuer.iss, "f2")
        assert gone.value.code == "E3001"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/jwks", "https://127.0.0.1:9/jwks", "ftp://x/y", "https://u:p@h/x"])
async def test_an_issuer_that_cannot_be_reached_as_it_must_fails_closed(url: str) -> None:
    issuer = TrustedIssuer.read({**FOREIGN, "jwks": url})
    with pytest.raises(Failure) as refused:
        await TrustedIssuers([issuer], clock=FakeClock().clock).find(issuer.iss, "f1")
    assert refused.value.code == "E3001"


@pytest.mark.parametrize(
    "entry", [{}, {**FOREIGN}, {**FOREIGN, "jwks": "x", "more": 1}, {**FOREIGN, "jwks": "x", "iss": AGENT},
              *({**FOREIGN, "jwks": "x", "algorithms": [name]} for name in ("HS256", "none", "RS384", "PS256"))],
)  # fmt: skip
@pytest.mark.supports("AUTH-01")
def test_a_trusted_issuer_that_is_half_stated_is_refused(entry: Json) -> None:
    with pytest.raises(Failure) as refused:
        TrustedIssuer.read(entry)
    assert refused.value.code == "E3108"


# Identities


class FakeRegistry:
    """Somebody else's registry of identities."""

    def __init__(self) -> None:
        self.known: dict[str, Identity] = {}
        self.reachable = True

    async def look_up(self, did: str) -> Identity | None:
        if not self.reachable:
            raise Failure("E3001", "the registry does not answer")
        return self.known.get(did)


@pytest.mark.proves("AUTH-03")
async def test_a_subject_must_be_known_to_the_registry(tmp_path: Path) -> None:
    registry = FakeRegistry()
    registry.known = {USER: Identity(did=USER, kind="human"), AGENT: Identity(did=AGENT, trust=7)}
    async with opened(tmp_path / "home", registry=registry) as world:
        token = await world.issue()
        assert (await world.tokens.verifier.verify(token)).trust == 7
        for gone in (USER, AGENT):
            kept = registry.known.pop(gone)
            assert await world.refusal_after_a_while(token) == "E3207"
            registry.known[gone] = Identity(did=gone, state="revoked")
            assert await world.refusal_after_a_while(token) == "E3207"
            registry.known[gone] = kept
        assert (await world.tokens.verifier.verify(token)).agent == AGENT
        registry.reachable = False
        assert await world.refusal_after_a_while(token) == "E3001"


async def test_identities_are_registered_updated_and_revoked_for_good(world: World) -> None:
    token = await world.issue()
    assert (await world.tokens.verifier.verify(token)).trust == 40
    await world.identities.update(Identity(did=AGENT, name="agent", trust=90), by="operator")
    await notice(world.clock, world.journal)
    assert world.tokens.verifier.known(token) is None
    assert (await world.tokens.verifier.verify(token)).trust == 90
    await world.identities.revoke(AGENT, reason="it misbehaved", by="operator")
    await notice(world.clock, world.journal)
    assert world.tokens.verifier.known(token) is None
    assert await world.refusal(token) == "E3201"
    with pytest.raises(Failure) as again:
        await world.identities.register(Identity(did=AGENT), by="operator")
    assert again.value.code == "E3103"
    with pytest.raises(Failure) as gone:
        await world.identities.update(Identity(did=AGENT), by="operator")
    assert gone.value.code == "E3207"
    assert await world.issue_refusal(subject=AGENT) == "E3207"
    assert [act["act"] for act in world.acts()][-2:] == ["identity.updated", "identity.revoked"]
    assert {one.did: one.state for one in await world.identities.all()}[AGENT] == "revoked"


@pytest.mark.parametrize(
    "wrong", [{"did": "alice"}, {"did": AGENT, "trust": 101}, {"did": AGENT, "trust": -1}, {"did": AGENT, "tenant": ""},
              {"did": AGENT, "groups": frozenset({"Über"})}],
)  # fmt: skip
async def test_an_identity_that_makes_no_sense_is_not_registered(world: World, wrong: Json) -> None:
    with pytest.raises(Failure) as refused:
        await world.identities.register(Identity(**wrong), by="operator")
    assert refused.value.code == "E3004"


async def test_a_chain_stays_within_one_tenant(world: World) -> None:
    await world.identities.update(Identity(did=AGENT, tenant="other"), by="operator")
    assert await world.issue_refusal() == "E3206"


# Issuing


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"by": Caller(id="local:guest")}, "E3206"),
        ({"subject": did_of("stranger")}, "E3207"),
        ({"subject": "agent"}, "E3004"),
        ({"ttl_s": 86_401}, "E3004"),
        ({"ttl_s": 0}, "E3004"),
        ({"scopes": ["A"]}, "E3004"),
        ({"tools": [ToolGrant("demo.add", "LATEST")]}, "E3004"),
        ({"constraints": {"colour": "red"}}, "E3004"),
        ({"resources": ["file:/a/../b"]}, "E3004"),
        ({"resources": [f"file:/{n}/{'x' * 480}" for n in range(100)]}, "E3004"),
    ],
)
async def test_what_would_not_verify_is_not_issued(world: World, given: Json, code: str) -> None:
    assert await world.issue_refusal(**given) == code
    assert not [act for act in world.acts() if act["act"] == "token.issued"]


async def test_whoever_issues_by_a_token_of_his_own_passes_it_on(world: World) -> None:
    caller = await world.tokens.verifier.verify(await world.issue(scopes=["a:read", "tokens:issue"]))
    below = await world.tokens.verifier.verify(
        await world.tokens.issue(subject=HELPER, scopes=["a:read"], ttl_s=60, by=caller)
    )
    assert below.capability is not None
    assert [link.subject for link in below.capability.links] == [USER, AGENT, HELPER]
    assert await world.issue_refusal(user=None, subject=HELPER, by=caller, scopes=["b:write"]) == "E3206"


async def test_a_picture_of_a_token_says_whether_it_holds_and_why_not(world: World) -> None:
    token = await world.issue()
    picture = await world.tokens.inspect(token, by=OPERATOR)
    assert (picture["valid"], picture["seconds_left"]) == (True, 600)
    assert [(link["name"], link["kind"]) for link in picture["chain"]] == [("user", "human"), ("agent", "agent")]
    world.clock.advance(600)
    picture = await world.tokens.inspect(token, by=OPERATOR)
    assert (picture["valid"], picture["code"], picture["seconds_left"]) == (False, "E3201", 0)
    assert [link["name"] for link in picture["chain"]] == ["user", "agent"]
    assert (await world.tokens.inspect("rubbish", by=OPERATOR))["code"] == "E3203"
    assert token.rpartition(".")[2] not in json.dumps(picture)


async def test_nothing_is_told_of_the_subjects_of_a_token_that_nobody_signed_or_of_another_tenant(world: World) -> None:
    token = await world.issue()
    await world.tokens.revoke(AGENT, reason="lost", by=OPERATOR)
    forged = sign(*parts(token), private_key("mallory", "RS256"))
    elsewhere = Caller(id="did:example:eve", tenant="acme")
    for shown, by, told in ((forged, OPERATOR, False), (token, elsewhere, False), (token, OPERATOR, True)):
        picture = await world.tokens.inspect(shown, by=by)
        assert picture["valid"] is False
        known = [tuple(link[name] for name in ("name", "kind", "tenant", "revoked")) for link in picture["chain"]]
        truth = [("user", "human", "local", False), ("agent", "agent", "local", True)]
        assert known == (truth if told else [(None,) * 4] * 2)


async def test_a_key_that_is_lost_is_told_from_one_that_is_retired_or_was_never_ours(world: World) -> None:
    first = world.keys.active()
    of_first = await world.issue()
    second = await world.tokens.rotate_key("EdDSA", by=OPERATOR)
    of_second = await world.issue()
    third = await world.tokens.rotate_key("EdDSA", by=OPERATOR)
    files = {key.kid: world.home.keys / "issuer" / f"{key.created_ms:015d}.{key.kid}.pem" for key in (first, second)}
    kept = {kid: path.read_bytes() for kid, path in files.items()}
    for path in files.values():
        path.unlink()
    # The first key was made without a record of its own: the token that it signed is on record.
    assert await world.refusal(of_first) == "E3001"
    assert await world.refusal(of_second) == "E3001"
    header, claims = parts(of_first)
    stranger = sign({**header, "kid": "A" * 43}, claims, private_key("stranger"))
    assert await world.refusal(stranger) == "E3202"
    for kid, path in files.items():
        path.touch(mode=0o600)
        path.write_bytes(kept[kid])
    assert (await world.tokens.verifier.verify(of_first)).agent == AGENT
    await world.tokens.retire_key(first.kid, reason="old", by=OPERATOR)
    assert await world.refusal(of_first) == "E3202"
    assert (await world.tokens.verifier.verify(of_second)).agent == AGENT
    assert world.keys.active().kid == third.kid


async def test_a_key_that_others_can_read_leaves_tokens_unchecked_and_does_not_call_them_bad(world: World) -> None:
    token = await world.issue()
    await world.tokens.rotate_key("EdDSA", by=OPERATOR)
    newest = max((world.home.keys / "issuer").glob("*.pem"))
    newest.chmod(0o644)
    keys = IssuerKeys(world.home.keys / "issuer", clock=world.clock.clock)
    later = Tokens(journal=world.journal, clock=world.clock.clock, keys=keys, registry=world.identities)
    with pytest.raises(Failure) as refused:
        await later.verifier.verify(token)
    assert (refused.value.code, newest.name in refused.value.message) == ("E3001", True)
    newest.chmod(0o600)
    assert (await later.verifier.verify(token)).agent == AGENT


def test_public_keys_are_written_as_a_library_of_others_writes_them() -> None:
    forms: dict[str, Any] = {
        "RS256": algorithms.RSAAlgorithm,
        "EdDSA": algorithms.OKPAlgorithm,
        "ES256": algorithms.ECAlgorithm,
    }
    # Among so many points of the curve are some of which a coordinate begins with a zero byte.
    points = [ec.derive_private_key(number, ec.SECP256R1()) for number in range(1, 600)]
    assert any(one.public_key().public_numbers().x < 1 << 248 for one in points)
    keys: list[Any] = [*map(make_private, ALGORITHMS), *points]
    for key in keys:
        public = key.public_key()
        written = forms[algorithm_of(public)].to_jwk(public, as_dict=True)
        assert to_jwk(public) == {name: written[name] for name in to_jwk(public)}
        assert thumbprint(from_jwk(to_jwk(public)).key) == thumbprint(public)
