"""The settings in effect, each with its source, as they may be shown: credentials are masked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.rights import require_here
from interlock.core.variables import variable
from interlock.default_settings import Defaults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.settings import Settings
    from interlock.store.home import Home


class SettingsView:
    """Shows the settings that this process was started with, for callers with `policy:admin`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def show(self, *, by: Caller) -> list[Json]:
        """Every setting with its value and its source."""
        require_here(by, "policy:admin", "looking at the settings")
        return _shown(self._parts.settings, self._parts.setting_sources)


def settings_at(home: Home) -> list[Json]:
    """The same of the settings that a process would be started with on a data directory now."""
    from interlock.store.shared_config import settings_of

    return _shown(*settings_of(home))


def _shown(effective: Settings, sources: Mapping[str, str]) -> list[Json]:
    return [
        {"name": name, "value": value, "source": sources.get(name, "default"), "variable": variable(name)}
        for name, value in _values(effective).items()
    ]


def _values(effective: Settings) -> Json:
    if isinstance(effective, Defaults):
        return effective.plain()  # no default is a credential
    from interlock.privacy.configured import masked  # most data directories have no stated settings

    return {name: masked(getattr(effective, name)) for name in type(effective).model_fields}
