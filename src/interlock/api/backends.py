"""Which back ends the settings choose, each loaded when it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.authority.policy import Engine, Policies
    from interlock.authority.secrets import Secrets, SecretSource
    from interlock.core.clock import Clock
    from interlock.privacy.redact import Redactor
    from interlock.settings import Settings


def engine(settings: Settings, embedded: Policies, clock: Clock, redactor: Callable[[], Redactor]) -> Engine:
    """The engine that decides about calls."""
    if settings.policy_engine == "embedded":
        return embedded
    from interlock.authority.remote import Remote

    token = None if settings.policy_token_file is None else settings.policy_token_file.read_text().strip()
    return Remote(
        settings.policy_url,
        form=settings.policy_form,
        timeout_s=settings.policy_timeout_s,
        token=token,
        clock=clock,
        arguments=settings.policy_arguments,
        redactor=redactor(),
    )


def secret_source(settings: Settings, embedded: Secrets, clock: Clock) -> SecretSource:
    """The source of credentials."""
    if settings.secrets == "embedded":
        return embedded
    from interlock.authority.vault import Vault

    return Vault(
        settings.vault_url,
        clock=clock,
        token_file=settings.vault_token_file,
        mount=settings.vault_mount,
        prefix=settings.vault_prefix,
        namespace=settings.vault_namespace,
        issued=settings.vault_issued,
    )
