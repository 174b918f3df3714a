"""Adds the MCP servers of a client's configuration as upstreams, one after the other; one that fails stops no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlock.api.rights import require_here
from interlock.api.upstreams import Upstreams
from interlock.core.credentials import without_credentials_in
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.kinds import kind_of_clients
from interlock.upstreams.overlay import hinted

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.upstreams.client_config import ServerEntry


async def import_servers(
    app: Interlock,
    entries: Sequence[ServerEntry],
    *,
    more: Json,
    explain: Callable[[str, Failure], Failure],
    begin: Callable[[str], None],
) -> list[Json]:
    """Store the credentials of each entry and add it; returns a document for each. `more` is added to every config.

    `begin` is called with the name of each before it is connected to. `explain` adds to the failure of an upstream what
    is known here only, such as the output of its program.
    """
    require_here(app.caller, "tools:admin", "adding an upstream")
    if any(one.secrets for one in entries):
        require_here(app.caller, "secrets:admin", "storing a credential")
    reports: list[Json] = []
    for one in entries:
        begin(one.name)
        reports.append(await _import(app, one, more, explain))
    return reports


def plan(entry: ServerEntry, more: Json) -> Json:
    """Describe an entry: the upstream it becomes, its credentials by name, and the settings that stay in clear."""
    config = entry.config
    state = "skipped" if entry.skipped else "refused" if entry.reason else "planned"
    return {
        "name": entry.name,
        "upstream": entry.upstream or None,
        "state": state,
        "reason": entry.reason,
        "runs": without_credentials_in(config.get("command") or config.get("url")),
        "credentials": config.get("credentials", {}),
        "in_clear": sorted({**config.get("env", {}), **config.get("headers", {})}),
        "accept_hints": bool(more.get("accept_hints")),
        "notes": list(entry.notes),
        "tools": [],
    }


async def _import(app: Interlock, entry: ServerEntry, more: Json, explain: Callable[[str, Failure], Failure]) -> Json:
    planned = plan(entry, more)
    if entry.reason:
        return planned
    config = entry.config | {key: one for key, one in more.items() if key != "allow_private" or "url" in entry.config}
    kind = kind_of_clients()
    known = next((one for one in await app.upstreams.list() if one.name == entry.upstream), None)
    if known is not None and known.kind == kind and _without_hints(known.config) == _without_hints(config):
        offers = await app.upstreams.offers(entry.upstream)
        told = {"state": "known", "reason": "it was added before", "tools": [one.document() for one in offers]}
        asks = "accept_hints" in more and not known.config.get("accept_hints")
        if asks and hinted(known.overlay, (one.definition for one in offers if one.definition)):
            told["next"] = f"to trust what it says about its tools: {hints_command(known.name)}"
        return planned | told
    stored: list[str] = []
    try:
        if known is None:
            stored = await _store(app, entry)
        report = await Upstreams(app, on_machine=True).add(entry.upstream, kind, config, by=app.caller)
    except Failure as failure:
        for name in stored:
            await app.secrets.remove(name, by=app.caller.acting)
        shown = explain(entry.upstream, failure)
        return planned | {
            "state": "refused",
            "reason": shown.in_full,
            "error_code": shown.code,
            "next": shown.resolution,
        }
    admitted = [one for one in report["tools"] if one["state"] == "admitted"]
    return planned | {"state": "added", "reason": "", "tools": report["tools"], "admitted": len(admitted)}


def _without_hints(config: Json) -> Json:
    return {name: value for name, value in config.items() if name != "accept_hints"}


def hints_command(name: str) -> str:
    """The command that accepts the hints of an upstream that was added before."""
    return f"interlock upstream refresh {name} --accept-hints"


async def _store(app: Interlock, entry: ServerEntry) -> list[str]:
    """Store the credentials of an entry. Returns the names that did not exist before.

    With Vault nothing is stored: the credentials are expected there under the same names.
    """
    if app.settings.secrets == "vault":
        return []
    before = {one.name for one in await app.secrets.names()}
    new: list[str] = []
    for name, value in entry.secrets.items():
        await app.secrets.set(name, value, by=app.caller.acting)
        if name not in before:
            new.append(name)
    return new
