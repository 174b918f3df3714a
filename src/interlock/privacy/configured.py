"""Credentials in a configuration: found, so that they can be refused, and masked where a configuration is shown.

A configuration names credentials (a stored one, a file) and does not hold them. In addresses, `{secret}` stands for one
that is named beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pydantic

from interlock.core.credentials import REDACTED, holds_credential, without_credentials
from interlock.core.expressions import expression

# The user of an address, alone or with a credential that is named elsewhere.
_USER: Final = expression(r"(://[^\s/@:]*(?::\{secret\})?@)")
_QUERY: Final = expression(r"[?&](?:\w*password|passwd|secret|token|api_?key)=[^&{]", re.IGNORECASE)

# A member that the model does not know may be anything; by such a name it is a credential.
_NAMED: Final = expression(r"(?:password|secret|token|credentials?|key)\Z", re.IGNORECASE)

# Services of apprise whose addresses name a server, a person or a topic. Those of all others, such as Slack, are
# credentials by themselves: nothing else is needed to send.
_NO_CREDENTIAL: Final = frozenset((
    "mailto", "mailtos", "json", "jsons", "xml", "xmls", "form", "forms", "ntfy", "ntfys", "mqtt", "mqtts", "syslog",
    "rsyslog", "dbus", "gnome", "macosx", "windows",
))  # fmt: skip


def inline_secrets(value: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """The places of texts that hold a credential themselves, instead of the name of one."""
    if isinstance(value, str):
        if _QUERY.search(value) or any(map(holds_credential, _USER.split(value)[::2])):
            yield place
    elif isinstance(value, dict):
        for name, one in cast("dict[str, Any]", value).items():
            yield from inline_secrets(one, (*place, name))
    elif isinstance(value, list):
        for at, one in enumerate(cast("list[Any]", value)):
            yield from inline_secrets(one, (*place, at))


def addresses_that_are_secrets(channels: Any) -> Iterator[tuple[int | str, ...]]:
    """The places of channels' addresses that are credentials, and do not say where a stored one belongs."""
    for at, channel in enumerate(cast("list[Any]", channels) if isinstance(channels, list) else ()):
        url: Any = cast("dict[str, Any]", channel).get("url") if isinstance(channel, dict) else None
        if isinstance(url, str) and "{secret}" not in url:
            service, colon, _ = url.partition("://")
            if colon and service.lower() not in _NO_CREDENTIAL:
                yield "channels", at, "url"


def masked(value: Any) -> Any:
    """A value of a configuration as JSON that may be shown: without credentials, and addresses that may hold one."""
    if isinstance(value, pydantic.BaseModel):
        # By its fields: what the model has computed of them and stored is no part of the configuration.
        known = {name: getattr(value, name) for name in type(value).model_fields}
        return {name: masked(one) for name, one in {**known, **(value.model_extra or {})}.items()}
    if isinstance(value, pydantic.SecretStr):
        return REDACTED
    if isinstance(value, str | Path):
        pieces = _USER.split(str(value))
        return "".join(piece if at % 2 else without_credentials(piece) for at, piece in enumerate(pieces))
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {
            name: REDACTED if isinstance(one, str) and _NAMED.search(name) else masked(one)
            for name, one in members.items()
        }
    if isinstance(value, list | tuple | frozenset):
        several = cast("Iterable[Any]", value)
        return [masked(one) for one in (sorted(several) if isinstance(value, frozenset) else several)]
    return value
