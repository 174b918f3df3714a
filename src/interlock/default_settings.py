"""The settings of a data directory that states none.

Most data directories have no settings.toml, and the models of settings take a fifth of the time of a command to load.
So the defaults are in a file, `default_settings.json`, which `./dev docs` writes from the models and a test compares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.core.record import NamedTuple
from interlock.core.variables import variable

if TYPE_CHECKING:
    from interlock.settings import Settings

FILE = Path(__file__).with_name("default_settings.json")


class Effective(NamedTuple):
    """The settings in effect, and the source of each one that is not a default: a line, a variable or the program."""

    settings: Settings
    sources: dict[str, str]


def defaults_if_unstated(path: Path) -> Settings | None:
    """The defaults, without the models, if neither the file nor a variable states a setting."""
    document = orjson.loads(FILE.read_bytes())
    try:
        is_stated = path.exists() or any(variable(name) in os.environ for name in document)
    except OSError:
        is_stated = True  # `effective_settings` tells why the file cannot be read
    if is_stated:
        return None
    return cast("Settings", Defaults(document))


def names() -> list[str]:
    """The names of all settings, in the order of the model's fields."""
    return list(Defaults(orjson.loads(FILE.read_bytes())).plain())


class Defaults:
    """Settings, or a part of them, with the attributes of the model. Whatever else is asked of it, the model answers.

    Parts are Defaults in turn; they know their place in the settings by `path`.
    """

    def __init__(self, values: dict[str, Any], path: tuple[str, ...] = ()) -> None:
        attributes = {name: _value(one, (*path, name)) for name, one in values.items() if not _is(one, "parts")}
        vars(self).update(attributes, _path=path, _values=values)

    def plain(self) -> dict[str, Any]:
        """The settings as JSON, in the order of the model's fields."""
        return {name: _plain(one) for name, one in self._values.items() if not _is(one, "property")}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # The models are loaded here because most commands need none of their methods.
        from interlock.settings import Settings

        model: Any = Settings.model_construct()
        for step in self._path:
            model = getattr(model, step)
        return getattr(model, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"settings are not changed: {name}")


# In the file {"part": …} is a part, {"parts": […]} a list of parts, and {"property": …} what the model computes of its
# fields. So they differ from settings that are tables.


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and kind in value


def _value(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    if _is(value, "property"):
        return value["property"]
    return Defaults(value["part"], path) if _is(value, "part") else value


def _plain(value: Any) -> Any:
    if _is(value, "part"):
        return Defaults(value["part"]).plain()
    return [Defaults(one).plain() for one in value["parts"]] if _is(value, "parts") else value
