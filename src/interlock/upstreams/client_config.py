"""Reads the MCP servers of a client's configuration file, and writes the configuration that replaces it.

    {"mcpServers": {…}}       Claude Desktop, Claude Code (`.mcp.json`), Cursor, Windsurf, Gemini CLI
    {"servers": {…}}          VS Code (`.vscode/mcp.json`), with `inputs`; comments and trailing commas are allowed
    {"mcp": {"servers": {…}}} VS Code (`settings.json`)

Each entry becomes the configuration of one MCP upstream. Such files hold credentials in clear, as variables and
headers. Here every value that may be a credential is separated from the configuration: it is stored as a secret, and
the configuration names it. A value counts as a credential unless its name and form say that it is a setting, because
a setting that is sealed does less harm than a credential that is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from interlock.core.credentials import CREDENTIALS, without_credentials
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import dataclass
from interlock.data.documents import Malformed, read_json
from interlock.data.schema import Json

MOST_BYTES = 16 << 20
MOST_SERVERS = 200
_PLACES = (("mcpServers",), ("servers",), ("mcp", "servers"), ("mcp", "mcpServers"))

# Asks a person for a value: the id, its description, and whether it is a credential. None if nobody can be asked.
Ask = Callable[[str, str, bool], str | None]


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """One server of the file. `config` adds it as an upstream, once `secrets` are stored under their names.

    If `reason` is not empty it cannot be added, or need not be (`skipped`).
    """

    name: str
    upstream: str = ""
    config: Json = field(default_factory=dict[str, Any])
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    notes: tuple[str, ...] = ()
    reason: str = ""
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """A client's configuration file: its whole document, the place of its servers, and the entries."""

    document: Json
    place: tuple[str, ...]
    entries: tuple[ServerEntry, ...]

    def replaced(self, command: list[str]) -> Json:
        """The document with Interlock, started by `command`, as its only server."""
        entry: Json = {"command": command[0], "args": command[1:]}
        if "mcpServers" not in self.place:
            entry = {"type": "stdio", **entry}
        changed: Any = {"interlock": entry}
        for depth in range(len(self.place) - 1, -1, -1):
            outer = self._at(self.place[:depth])
            changed = {name: one for name, one in outer.items() if name != "inputs"} | {self.place[depth]: changed}
        return changed

    def _at(self, place: tuple[str, ...]) -> Json:
        found = self.document
        for name in place:
            found = found[name]
        return found


def is_ours(raw: bytes) -> bool:
    """Whether Interlock is the only server of a configuration, so that replacing it loses nothing."""
    try:
        document = _read(raw)
        return list(_servers(document)[1]) == ["interlock"]
    except Failure:
        return False


def read_client_config(
    raw: bytes, *, path: Path, environment: Mapping[str, str], ask: Ask, plain: Iterable[str] = ()
) -> ClientConfig:
    """Read a configuration file; E3004 if it is none. An entry that cannot be used is returned with its reason.

    `plain` names variables and headers that are settings, whatever they look like.
    """
    document = _read(raw)
    place, servers = _servers(document)
    if len(servers) > MOST_SERVERS:
        raise Failure("E3004", f"`{path.name}` has more than {MOST_SERVERS} servers")
    inputs = document.get("inputs", document.get("mcp", {}).get("inputs") if "mcp" in place else None)
    values = _Values(environment, _workspace(path), _by_id(inputs), ask)
    taken: set[str] = set()
    entries = [_entry(name, entry, values, taken, frozenset(plain)) for name, entry in servers.items()]
    return ClientConfig(document, place, tuple(entries))


def _read(raw: bytes) -> Json:
    if len(raw) > MOST_BYTES:
        raise Failure("E3004", f"the file is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = raw.decode("utf-8-sig")
        document = read_json(_without_comments(text))
    except UnicodeDecodeError:
        raise Failure("E3004", "the file is not text in UTF-8") from None
    except Malformed as error:
        raise Failure("E3004", f"the file is {error}") from None
    if not isinstance(document, dict):
        raise Failure("E3004", "the file does not hold a JSON object")
    return cast("Json", document)


_COMMENTS = expression(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_COMMAS = expression(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[}\]])')


def _without_comments(text: str) -> str:
    """Remove comments and trailing commas, which VS Code allows; lines keep their numbers."""
    text = _COMMENTS.sub(lambda one: one[0] if one[0][0] == '"' else "\n" * one[0].count("\n"), text)
    return _COMMAS.sub(lambda one: one[0] if one[0][0] == '"' else "", text)


def _servers(document: Json) -> tuple[tuple[str, ...], Json]:
    for place in _PLACES:
        found: Any = document
        for name in place:
            found = cast("Json", found).get(name) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return place, cast("Json", found)
    raise Failure(
        "E3004",
        "the file has no `mcpServers` and no `servers`",
        resolution="give the file in which your client lists its MCP servers, such as claude_desktop_config.json,"
        " .mcp.json, .cursor/mcp.json or .vscode/mcp.json",
    )


def _by_id(inputs: Any) -> dict[str, Json]:
    listed = cast("list[Any]", inputs) if isinstance(inputs, list) else []
    objects = [cast("Json", one) for one in listed if isinstance(one, dict)]
    return {str(one["id"]): one for one in objects if "id" in one}


def _workspace(path: Path) -> Path | None:
    """The directory that a project's configuration belongs to; None for the configuration of a user."""
    parent = path.absolute().parent
    if parent.name in (".vscode", ".cursor"):
        return parent.parent
    return parent if path.name == ".mcp.json" else None


# Values


class _Unusable(Exception):  # noqa: N818 - the entry is
    """The entry cannot be used; the message says why."""


_VARIABLE = expression(r"\$\{([^${}]{1,500})\}")


@dataclass(frozen=True, slots=True)
class _Values:
    """Replaces the variables in a value: `${NAME}`, `${NAME:-default}`, `${env:NAME}`, `${input:id}` and others."""

    environment: Mapping[str, str]
    workspace: Path | None
    inputs: Mapping[str, Json]
    ask: Ask
    answers: dict[str, str] = field(default_factory=dict[str, str])

    def of(self, text: str, *, own: Mapping[str, Any] | None = None, shown: bool = False) -> str:
        """The text with its variables replaced. Names in `own` stay: the program replaces them itself.

        `shown`: the result is stored in clear, so that no credential may be asked for.
        """

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if own is not None and name in own:
                return match[0]
            kind, colon, rest = name.partition(":")
            if kind == "input" and colon:
                return self._input(rest, shown=shown)
            if kind == "env" and colon:
                return self._variable(rest, None)
            if name.startswith("workspaceFolder") or name == "userHome" or name in ("pathSeparator", "/"):
                return self._predefined(name)
            name, colon, default = name.partition(":-")
            return self._variable(name, default if colon else None)

        return _VARIABLE.sub(value, text)

    def _variable(self, name: str, default: str | None) -> str:
        found = self.environment.get(name, default)
        if found is None:
            raise _Unusable(f"it uses the variable `{name}`, which is not set here; set it and import again")
        return found

    def _predefined(self, name: str) -> str:
        if name == "userHome":
            return str(Path.home())
        if name in ("pathSeparator", "/"):
            return "/"
        if self.workspace is None:
            raise _Unusable(f"it uses `${{{name}}}`, and the file does not belong to a workspace; write the path")
        return self.workspace.name if name == "workspaceFolderBasename" else str(self.workspace)

    def _input(self, name: str, *, shown: bool) -> str:
        asked = self.inputs.get(name, {})
        if shown and asked.get("password"):
            raise _Unusable(f"its command or address contains the password `{name}`; pass it as a variable or a header")
        if name not in self.answers:
            answer = self.ask(name, str(asked.get("description", name)), bool(asked.get("password", True)))
            if answer is None:
                raise _Unusable(f"it asks for `{name}`; import the file in a terminal, where you can be asked")
            self.answers[name] = answer
        return self.answers[name]


_SECRET_NAME = expression(
    r"TOKEN|SECRET|PASS|PWD|KEY|CREDENTIAL|COOKIE|DSN|AUTH|BEARER|CONNECTION|SESSION|SIGNATURE|PRIVATE|CERT|\bPAT\b|_PAT\b",
    re.IGNORECASE,
)
_SETTING_NAME = expression(
    r"(?:^|[_-])(?:PATH|DIR|DIRECTORY|HOME|ROOT|FOLDER|FILE|HOST|HOSTNAME|PORT|REGION|ZONE|MODE|LEVEL|ENV|ENVIRONMENT|LANG"
    r"|LOCALE|TZ|TIMEZONE|TIMEOUT|DEBUG|VERBOSE|FORMAT|TYPE|VERSION|MODEL|TRANSPORT|URL|URI|ENDPOINT|TOOLSETS?|TOOLS"
    r"|READONLY|ENABLED|LIMIT|ACCEPT|AGENT)$",
    re.IGNORECASE,
)
_SETTING = expression(r"(?i:true|false|yes|no|on|off|none)|-?[0-9]{1,9}(?:\.[0-9]{1,9})?|[a-z]{1,12}")
_LOCATION = expression(r"(?:~|\.{0,2})/[^\s:=@?]*")


def is_setting(name: str, value: str) -> bool:
    """Whether a variable or header is evidently a setting, and no credential: by its name, and by its value."""
    if not value:
        return True
    if _SECRET_NAME.search(name) or CREDENTIALS.search(value) or without_credentials(value) != value:
        return False
    if _SETTING.fullmatch(value) or _LOCATION.fullmatch(value):
        return True
    if "://" in value:
        parts = urlsplit(value)
        return "@" not in parts.netloc and not parts.query and not parts.fragment and len(parts.path) <= 64
    return _SETTING_NAME.search(name) is not None and len(value) <= 200


# Entries


def _entry(name: str, entry: Any, values: _Values, taken: set[str], plain: frozenset[str]) -> ServerEntry:
    if not isinstance(entry, dict):
        return ServerEntry(name, reason="its entry is not an object")
    try:
        return _read_entry(name, cast("Json", entry), values, taken, plain)
    except _Unusable as unusable:
        return ServerEntry(name, reason=str(unusable))


def _read_entry(name: str, entry: Json, values: _Values, taken: set[str], plain: frozenset[str]) -> ServerEntry:
    if entry.get("disabled") is True or entry.get("enabled") is False:
        return ServerEntry(name, reason="it is disabled in the file", skipped=True)
    command = _text(entry, "command")
    args = _texts(entry, "args")
    if name == "interlock" or (command or "").rpartition("/")[2] == "interlock" or "interlock.cli" in args:
        return ServerEntry(name, reason="it is Interlock itself", skipped=True)
    if entry.get("envFile"):
        raise _Unusable("it reads variables from `envFile`; write those that it needs into `env`, and import again")
    upstream = _upstream_name(name, taken)
    url = next((found for key in ("url", "serverUrl", "httpUrl") if (found := _text(entry, key))), None)
    if (command is None) == (url is None):
        raise _Unusable("it has neither `command` nor `url`" if url is None else "it has both `command` and `url`")
    given = _mapping(entry, "headers" if command is None else "env")
    config: Json
    notes: list[str] = []
    if command is not None:
        words = [values.of(one, own=given, shown=True) for one in (command, *args)]
        if any(CREDENTIALS.search(one) or without_credentials(one) != one for one in words):
            notes.append("an argument looks like a credential, and is stored in clear; pass it as a variable instead")
        config = {"command": words}
        cwd = _text(entry, "cwd")
        where = values.workspace if cwd is None else Path(values.of(cwd, shown=True)).expanduser()
        if where is not None:
            config["cwd"] = str(where if values.workspace is None else values.workspace / where)
    else:
        assert url is not None
        address = values.of(url, shown=True)
        config = {"url": address}
        if urlsplit(address).query:
            notes.append("its address has a query, which is stored in clear; pass a credential as a header instead")
        if entry.get("type") == "sse" or address.rstrip("/").endswith("/sse"):
            notes.append("the HTTP+SSE transport is not supported; streamable HTTP is tried at the same address")
    secrets = _add_values(config, "headers" if command is None else "env", given, values, upstream, plain)
    return ServerEntry(name, upstream, config, secrets, tuple(notes))


def _add_values(
    config: Json, key: str, given: Mapping[str, str], values: _Values, upstream: str, plain: frozenset[str]
) -> dict[str, str]:
    """Put variables or headers into a configuration: settings as they are, credentials by the name of a secret."""
    settings: dict[str, str] = {}
    credentials: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, text in given.items():
        value = values.of(text)
        if name in plain or is_setting(name, value):
            settings[name] = value
            continue
        if name.lower() == "authorization" and value.lower().startswith("bearer "):
            value = value[len("bearer ") :].strip()  # the scheme is added when it is sent
        secret = credentials[name] = f"mcp/{upstream}/{re.sub(r'[^a-z0-9_-]', '_', name.lower())[:100]}"
        secrets[secret] = value
    if settings:
        config[key] = settings
    if credentials:
        config["credentials"] = credentials
    return secrets


def _upstream_name(name: str, taken: set[str]) -> str:
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")
    plain = plain if plain[:1].isalpha() else f"mcp-{plain}".rstrip("-")
    candidate, number = plain[:55], 2
    while _alike(candidate) in taken:
        candidate, number = f"{plain[:55]}-{number}", number + 1
    taken.add(_alike(candidate))
    return candidate


def _alike(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _text(entry: Json, key: str) -> str | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise _Unusable(f"`{key}` is not a text")
    return value


def _texts(entry: Json, key: str) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[Any]", value)):
        raise _Unusable(f"`{key}` is not a list of texts")
    return cast("list[str]", value)


def _mapping(entry: Json, key: str) -> dict[str, str]:
    value: Any = entry.get(key)
    if value is not None and not isinstance(value, dict):
        raise _Unusable(f"`{key}` is not an object")
    found: dict[str, str] = {}
    for name, one in cast("Json", value or {}).items():
        if isinstance(one, bool):
            found[name] = "true" if one else "false"
        elif isinstance(one, str | int | float):
            found[name] = str(one)
        elif one is not None:
            raise _Unusable(f"`{key}.{name}` is not a text")
    return found
