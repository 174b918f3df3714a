"""Takes credentials out of the environment of a process that is ours, before it runs tools.

A function that runs in process sees what the process sees. Interlock reads its settings and tokens first; after that,
every variable that holds a credential is removed, by its name or by a password in its value: from `os.environ`, from
the environment of child processes and, on Linux, from the block that /proc/self/environ shows. The setting
`keep_environment` names variables that tools need.

A program that uses Interlock as a library keeps its environment: it is not ours to change.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from interlock.core.expressions import expression

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.settings import Settings

_log = logging.getLogger("interlock.settings")

_NAMES = expression(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD_?FILE|API_?KEY|ACCESS_?KEY(?:_ID)?|PRIVATE_?KEY|SECRET_?KEY|_KEY"
    r"|CREDENTIALS?|COOKIE|DSN)S?(?:_FILE)?$",
    re.IGNORECASE,
)
# They hold no credential, and lead to one.
_LEADING = frozenset(
    {
        "SSH_AUTH_SOCK", "KRB5CCNAME", "KUBECONFIG", "PGPASSFILE", "AWS_PROFILE", "DOCKER_CONFIG",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    }
)  # fmt: skip
_PASSWORD = expression(r"://[^/\s:@]*:[^/\s@]+@")


def prepare_server(app: Interlock) -> None:
    """Clear the environment of credentials, and write logs as the settings say. Nothing was logged before."""
    from interlock.api.config_check import mistyped_variables
    from interlock.privacy.redact import safe_log
    from interlock.telemetry.logs import configure

    settings = app.settings
    mistyped = mistyped_variables()
    clear_credentials(settings)
    configure(settings.log_format, settings.log_level, redact=lambda text: safe_log(app.authority.redactor, text))
    for name, meant in mistyped:
        _log.warning("the variable %s sets nothing; did you mean %s?", name, meant)


def clear_credentials(settings: Settings) -> list[str]:
    """Remove every variable that holds a credential, unless the settings keep it. Returns their names."""
    # Connections to the store and to watched databases read these whenever one is opened, long after the start.
    on_postgres = settings.store or settings.store_admin or settings.watched_postgres
    own = ("PGPASSFILE", "PGPASSWORD") if on_postgres else ()
    keep = {*settings.keep_environment, *own}
    found = [name for name, value in os.environ.items() if name not in keep and _is_credential(name, value)]
    if found:
        _overwrite({os.fsencode(name) for name in found})
    for name in found:
        del os.environ[name]
    return found


def _is_credential(name: str, value: str) -> bool:
    return name in _LEADING or _NAMES.search(name) is not None or _PASSWORD.search(value) is not None


def _overwrite(names: Collection[bytes]) -> None:
    """Overwrite values where they stand. The process started with them, and /proc shows that memory as it is now."""
    import ctypes  # takes as long as everything else here, and most environments hold no credential

    try:
        block = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    except (OSError, ValueError):
        return  # a platform without it has no such file either
    at = 0
    while address := block[at]:
        name, equals, value = ctypes.string_at(address).partition(b"=")
        if equals and name in names:
            ctypes.memset(address + len(name) + 1, 0, len(value))
        at += 1
