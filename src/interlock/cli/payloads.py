"""`interlock calls payload`: a result that was kept instead of shown, or one of the files that a call left.

`Interlock.read_payload` checks who may read it, as for every endpoint.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, acting, as_holder, over_home

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.call.context import Caller
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.command()
@click.argument("name", metavar="ID")
@click.option("--out", "path", type=click.Path(), metavar="FILE", help="Write it there; never over a file.")
@as_holder
@over_home
async def payload(lock: Interlock, out: Output, /, name: str, path: str | None, token: str | None) -> int:
    """A result of yours that was too large to be shown, or a file that a call of yours left, byte for byte.

    ID is the call, or the reference that its result names: payload:01JC… for a result, payload:01JC….1 for a file.

    \b
    interlock calls payload 01JCXK2M4Q8Z… | jq .
    interlock calls payload payload:01JCXK2M4Q8Z….1 --out chart.png
    """
    from interlock.call.artifacts import is_file

    ref, body = await _read(lock, name, await acting(lock, token))
    told: Json = {"payload_ref": ref, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    if path is not None:
        from pathlib import Path

        from interlock.cli.artifacts import write_new

        write_new(Path(path), body)
        out.answer({**told, "file": path}, lambda page: page.line(f"{len(body):,} bytes written to {path}"))
    elif out.as_json:
        out.write({**told, **_content(ref, body)})
    elif not out.stdout.isatty():
        out.stdout.write(body)
        out.stdout.flush()
    elif is_file(ref):
        raise click.UsageError(f"{ref} is a file, and this is a terminal; say where to write it: --out FILE")
    else:
        _show(out.page(), body)
    return 0


async def _read(lock: Interlock, name: str, caller: Caller) -> tuple[str, bytes]:
    """The payload of a reference or a call. A file is returned only if it matches the record of its call."""
    from interlock.call.artifacts import is_file, recalled
    from interlock.cli import artifacts
    from interlock.cli.history import find
    from interlock.core.errors import Failure
    from interlock.store import payloads

    if not name.startswith("payload:"):
        history = await find(lock.journal, name, caller)
        ref = f"payload:{history.facts.get('replayOf') or history.call}"
        if not await lock.journal.read(lambda reader: payloads.exists(reader, ref)):
            files = "its files: interlock calls save" if history.facts.get("artifacts") else "see interlock calls show"
            raise Failure("E3702", f"call {history.call} has no result that was kept", resolution=files)
        return ref, await lock.read_payload(ref, caller=caller)
    body = await lock.read_payload(name, caller=caller)
    if is_file(name):
        history = await find(lock.journal, name[len("payload:") :].partition(".")[0])
        left = recalled(history.facts.get("artifacts", ()))
        artifacts.check({one: body for one in left if one.ref == name})
    return name, body


def _content(ref: str, body: bytes) -> Json:
    from interlock.call.artifacts import is_file

    if is_file(ref):
        import base64

        return {"content_base64": base64.b64encode(body).decode()}
    import orjson

    return {"content": orjson.Fragment(body)}  # as it is: numbers may be longer than others read them


def _show(page: Page, body: bytes) -> None:
    import json

    value = json.loads(body)
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    for line in text.split("\n"):
        page.line(line)
