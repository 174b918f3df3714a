"""A site for executors that are made outside a gateway."""

from __future__ import annotations

from typing import Any

from interlock.call.connector import Connector
from interlock.call.context import Caller, Context
from interlock.call.phases import Call, Granted
from interlock.contract.manifest import NetworkPolicy
from interlock.core.clock import Clock
from interlock.executors.site import Site


def site(clock: Clock | None = None) -> Site:
    """A site with a grant of its own, which no gateway gives, and nothing else."""
    return Site(
        grant=object(),
        clock=clock or Clock(),
        network=NetworkPolicy(allowed_domains=(), allowed_ports=()),
        network_of={},
        connect=_nowhere,
        narrowed=_same,
        make_context=_no_context,
        alert=_unheard,
        hide=lambda call, text: text,
        violated=lambda call, attempts: None,
        checkpoints=None,
        sandbox=None,
        grace_s=0.2,
        read_file=_no_file,
    )


def _nowhere(upstream: str) -> Connector:
    raise AssertionError(f"{upstream} was to be connected")


def _same(granted: Granted) -> Caller:
    assert granted.request.caller is not None
    return granted.request.caller


def _no_context(granted: Granted) -> Context:
    raise AssertionError(f"{granted.ref} was to have a context")


def _unheard(name: str, call: Call, /, **facts: Any) -> None: ...


async def _no_file(ref: str, caller: Caller) -> bytes:
    raise AssertionError(f"{ref} was to be read")
