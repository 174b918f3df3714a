"""Keys and DIDs of the people and agents in tests."""

from __future__ import annotations

import functools
from typing import Any

from interlock.authority.dids import make_did_key
from interlock.authority.keys import make_private
from interlock.call.context import Caller


@functools.cache
def private_key(name: str, algorithm: Any = "EdDSA") -> Any:
    """A key of this test run; making an RSA key takes longer than most tests."""
    return make_private(algorithm)


def did_of(name: str) -> str:
    return make_did_key(private_key(name).public_key())


USER, AGENT, HELPER = did_of("user"), did_of("agent"), did_of("helper")
OPERATOR = Caller(id="local:operator", scopes=frozenset({"tokens:issue"}))
