"""`Interlock.open(…)`: prepares and opens a data directory, and cleans up after earlier processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from interlock.authority import budgets
from interlock.authority.identities import DidRegistry
from interlock.authority.policy import make_defaults
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.store import facts
from interlock.store.homes import home_at
from interlock.store.port import Transaction, Unit
from interlock.store.sealing import SEALED_BY
from interlock.store.shared_config import settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.parts import Parts
    from interlock.gateway.hooks import Hook
    from interlock.settings import HookSetting


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
        settings, sources = settings_of(self._home, **self._settings)
        if self._home.new:
            # INVARIANT: these come before the database and never after it: where there is one, a missing policy denies.
            make_defaults(self._home.policy, self._home.principals)
        # INVARIANT: a hook that cannot be loaded refuses the start; a check that is set up is never left out.
        hooks = [_hook(one, self._home.path) for one in settings.hooks]
        parts = self._make(
            self._home,
            clock=self._home.node_clock(self._clock),
            store_clock=self._store_clock,
            settings=settings,
            caller=self._caller,
            registry=self._registry,
        )
        parts.setting_sources = sources
        for hook in hooks:
            parts.hooks.registered.append(hook)
        try:
            await parts.journal.read(self._home.still_known)
            if settings.secrets_key == "keyring":
                await _prepare_keys(parts)
            if not self._home.near:
                await _within_patience(_agree_on_keys(parts))
            await parts.background.close_dead_calls()
            await parts.journal.commit(budgets.release_orphans(parts.instance.alive))
            await parts.sweep_tickets()
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


def _hook(setting: HookSetting, within: Path) -> Hook:
    from interlock.gateway.hooks import Hook
    from interlock.registry.source import function  # loaded where there is a hook: it loads declarations

    try:
        run = function(setting.run, within)
    except Failure as failure:
        raise Failure(
            failure.code,
            f"hook `{setting.id}` of settings.toml: {failure.message}",
            resolution="correct its `run`, or take the hook out of the settings; nothing runs without it until then",
        ) from failure
    return Hook(id=setting.id, when=setting.when, run=run, tools=setting.tools, timeout_s=setting.timeout_s)


async def _prepare_keys(parts: Parts) -> None:
    """Ask the keyring before anything is sealed. Where it does not answer, sealing says so each time it is needed."""
    try:
        async with asyncio.timeout(KEYRING_S):
            await DISK.run(parts.box.prepare)
    except (TimeoutError, Failure) as error:
        why = error.message if isinstance(error, Failure) else "it does not answer"
        _log.warning("the operating system's keyring is not ready: %s", why)


async def _within_patience(agreeing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(KEYRING_S):
            await agreeing
    except TimeoutError:
        words = "the operating system's keyring does not answer, so its sealing key cannot be compared with the store's"
        raise Failure("E3601", words, resolution="unlock the keyring, then start again") from None


async def _agree_on_keys(parts: Parts) -> None:
    """Refuse (E3804) a data directory whose sealing key is not that of its store, which other machines use too.

    Keys that a new store needs are made at once, and not when they are first used: other machines need a copy of them.
    """
    sealed_by = await parts.journal.read(lambda reader: facts.get(reader, SEALED_BY))
    if sealed_by is not None and sealed_by not in await DISK.run(parts.box.ids):
        raise Failure(
            "E3804",
            "the sealing key of this data directory is not that of the store",
            resolution="copy the directory `keys` from a machine that uses the store to this one, then start again",
        )
    current = await DISK.run(lambda: parts.box.current)
    await DISK.run(parts.cursors.prepare)
    await parts.journal.commit(lambda transaction: facts.put(transaction, SEALED_BY, current))


def _with_key_secret(secret: str) -> Unit[None]:
    """A unit that gives a new data directory the secret its idempotency keys are derived under."""

    def unit(transaction: Transaction) -> None:
        facts.put_once(transaction, "key_secret", secret)

    return unit
