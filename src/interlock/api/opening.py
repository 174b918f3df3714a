"""`Interlock.open(…)`: prepares a home, opens it, and puts in order what processes before it left."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from interlock.authority import budgets
from interlock.authority.identities import DidRegistry
from interlock.authority.policy import make_defaults
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.gateway import reconcile
from interlock.gateway.hooks import Hook
from interlock.registry.source import function
from interlock.settings import HookSetting, load_settings
from interlock.store import facts
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.port import Transaction, Unit

if TYPE_CHECKING:
    from interlock.api.parts import Parts


T = TypeVar("T", bound="Parts")

# How long opening a home waits for the operating system's keyring, which may be waiting for a person.
KEYRING_S = 30.0
_log = logging.getLogger("interlock")


class Opening(Generic[T]):
    """An Interlock that is about to be opened, for `async with` or `await`."""

    def __init__(
        self,
        make: Callable[..., T],
        home: str | os.PathLike[str],
        clock: Clock,
        store_clock: Clock,
        caller: str | None,
        registry: DidRegistry | None,
        settings: Mapping[str, Any],
    ) -> None:
        self._make = make
        self._home = home_at(home, settings.get("store"), settings.get("store_admin"))
        self._clock = clock
        self._store_clock = store_clock
        self._caller = caller
        self._registry = registry
        self._settings = settings
        self._opened: T | None = None

    async def start(self) -> T:
        """Open without a context manager; close it yourself."""
        self._home.prepare()
        settings = load_settings(self._home.settings, **self._settings)
        if self._home.new:
            # INVARIANT: these come before the database and never after it: where there is one, a missing policy denies.
            make_defaults(self._home.policy, self._home.principals)
        # INVARIANT: a hook that cannot be loaded refuses the start; a check that is set up is never left out.
        hooks = [_hook(one, self._home) for one in settings.hooks]
        parts = self._make(
            self._home,
            clock=self._clock,
            store_clock=self._store_clock,
            settings=settings,
            caller=self._caller,
            registry=self._registry,
        )
        for hook in hooks:
            parts.gateway.hooks.registered.append(hook)
        try:
            self._home.still_known()
            if settings.secrets_key == "keyring":
                await _prepare_keys(parts)
            elif not self._home.near:
                # Made at once, and not when it is first needed: other nodes need a copy of it.
                await DISK.run(lambda: parts.box.current)
            await reconcile.block_orphans(parts.journal, parts.instance.alive, parts.gateway.observer.announce)
            await parts.journal.commit(reconcile.close_abandoned(parts.instance.alive))
            await parts.journal.commit(budgets.release_orphans(parts.instance.alive))
            await parts.approvals.sweep()
            await parts.journal.commit(_with_key_secret(self._clock.random_bytes(32).hex()))
        except BaseException:
            # A home that opens and cannot be written is refused, and nothing of the attempt is left running.
            await parts.close()
            raise
        return parts

    async def __aenter__(self) -> T:
        self._opened = await self.start()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.close()

    def __await__(self) -> Any:
        return self.start().__await__()


def _hook(said: HookSetting, home: Home) -> Hook:
    try:
        run = function(said.run, home.path)
    except Failure as failure:
        raise Failure(
            failure.code,
            f"hook `{said.id}` of settings.toml: {failure.message}",
            resolution="correct its `run`, or take the hook out of the settings; nothing runs without it until then",
        ) from failure
    return Hook(id=said.id, when=said.when, run=run, tools=said.tools, timeout_s=said.timeout_s)


async def _prepare_keys(parts: Parts) -> None:
    """Ask the keyring before anything is sealed. Where it does not answer, sealing says so each time it is needed."""
    try:
        async with asyncio.timeout(KEYRING_S):
            await DISK.run(parts.box.prepare)
    except (TimeoutError, Failure) as error:
        why = error.message if isinstance(error, Failure) else "it does not answer"
        _log.warning("the operating system's keyring is not ready: %s", why)


def _with_key_secret(secret: str) -> Unit[None]:
    """A unit that gives a new home the secret its idempotency keys are derived under."""

    def unit(transaction: Transaction) -> None:
        facts.put_once(transaction, "key_secret", secret)

    return unit
