"""Policy, identities, tokens and credentials of one data directory, and the caller that acts where none is named."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from interlock.api.backends import engine, secret_source
from interlock.api.followed_config import follow
from interlock.api.local_user import local_user
from interlock.api.messages import Messages
from interlock.authority.identities import DidRegistry, LocalIdentities
from interlock.authority.keys import IssuerKeys
from interlock.authority.policy import Policies
from interlock.authority.secrets import Secrets, SecretSource, open_lease
from interlock.call.context import Caller
from interlock.call.phases import Lease
from interlock.store.sealing import Box

if TYPE_CHECKING:
    from interlock.authority.tokens import Tokens
    from interlock.core.clock import Clock
    from interlock.core.supervise import Supervisor
    from interlock.privacy.redact import Redactor
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.store.port import Store

# A name that neither a DID nor a trusted issuer has.
DEFAULT_ISSUER = "interlock"


class Authority:
    """Decides who callers are and what they may do, and lends credentials."""

    def __init__(
        self,
        home: Home,
        journal: Store,
        *,
        clock: Clock,
        settings: Settings,
        supervisor: Supervisor,
        caller: str | None,
        registry: DidRegistry | None,
    ) -> None:
        self._home = home
        self._journal = journal
        self._clock = clock
        self._settings = settings
        if settings.redact_patterns or settings.redact_names:
            _ = self.redactor  # rules that cannot be used refuse the start
        self.policy = Policies(
            home.policy, home.principals, clock=clock, environment=settings.environment, shared=follow(home, journal)
        )
        self.engine = engine(settings, self.policy, clock, lambda: self.redactor)
        self.issuer_keys = IssuerKeys(home.keys / "issuer", clock=clock)
        self.identities = LocalIdentities(journal)
        self._registry = registry or self.identities
        if settings.trusted_issuers or settings.token_issuer != DEFAULT_ISSUER:
            _ = self.tokens  # issuers that cannot be used refuse the start
        self.box = Box(home.keys, where=settings.secrets_key)
        self.secrets = Secrets(journal, self.box, clock)
        self._configured = self.lent_from = secret_source(settings, self.secrets, clock)
        self.messages = Messages(
            settings,
            engine=self.engine,
            changes=journal.changes,
            secret=self.secret_texts,
            supervisor=supervisor,
            clock=clock,
        )
        self._caller_id = caller or f"local:{local_user()}"
        self._acting: Caller | None = None

    @cached_property
    def redactor(self) -> Redactor:
        """Redacts texts and data. Many commands show none, so it is loaded on first use."""
        from interlock.privacy.redact import RedactionRules, Redactor

        settings = self._settings
        return Redactor(
            RedactionRules(
                strict=settings.strict_redaction,
                extra_patterns=tuple(one.rule for one in settings.redact_patterns),
                extra_names=settings.redact_names,
            )
        )

    @cached_property
    def tokens(self) -> Tokens:
        """Issues and verifies tokens. Many commands have none, so it is loaded on first use."""
        from interlock.authority.tokens import Tokens
        from interlock.authority.trusted_issuers import TrustedIssuer, TrustedIssuers

        settings = self._settings
        return Tokens(
            journal=self._journal,
            clock=self._clock,
            keys=self.issuer_keys,
            registry=self._registry,
            trusted=TrustedIssuers(
                [TrustedIssuer.read(entry) for entry in settings.trusted_issuers],
                clock=self._clock,
                named=self._home.named,
            ),
            issuer=settings.token_issuer,
            audience=settings.token_audience,
            max_ttl_s=settings.token_max_s,
        )

    @property
    def caller(self) -> Caller:
        """The caller where none is named: the local user as principals.toml describes them, or whom `act_as` set."""
        return self._acting or self.policy.principal(self._caller_id)

    def act_as(self, caller: Caller) -> None:
        """Make another caller the default, where none is named."""
        self._acting = caller

    async def caller_of(self, token: str) -> Caller:
        """The holder of a token, with the authority it carries; raises E3201, E3202, E3203 or E3207."""
        return self.tokens.verifier.known(token) or await self.tokens.verifier.verify(token)

    async def revive(self, asked: Caller) -> Caller:
        """The caller of a call that waited, with the authority they have now."""
        if asked.capability is not None:
            return await self.tokens.verifier.renew(asked.capability)
        if not asked.id.startswith("local:"):
            return asked  # the program that uses the library described this caller; its description stands
        known = self.policy.principal(asked.id)
        return known if asked.agent is None else replace(asked, scopes=asked.scopes & known.scopes)

    def lend_from(self, source: SecretSource) -> None:
        """Lend credentials from another source than the settings name."""
        self.lent_from = source

    async def lend(self, names: tuple[str, ...], lifetime_s: float) -> Lease:
        """Lend credentials to a call for a limited time."""
        return await open_lease(self.lent_from, names, lifetime_s=lifetime_s, clock=self._clock)

    async def secret_texts(self, name: str) -> list[str]:
        """A stored secret, for a notification channel that is about to be used."""
        credential = await self.lent_from.fetch(name)
        try:
            return [credential.reveal()]
        finally:
            credential.wipe()

    async def close(self) -> None:
        """Send the last messages, and close the connections to the policy engine and to the source of credentials."""
        await self.messages.close()
        await self.engine.close()
        await self._configured.close()
