"""`interlock calls payload` and `part`: a result that was kept instead of shown, or a file that a call left.

`Interlock.read_payload` checks who may read it, as for every endpoint.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import acting, as_holder, at_server, over_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.call.context import Caller
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


async def _payload_at_server(server: Server, out: Output, /, name: str, path: str | None) -> int:
    from interlock.cli.remote import part

    ref = name if name.startswith("payload:") else f"payload:{name}"
    body = b"".join([piece async for piece in server.stream(f"/v1/payloads/{part(ref)}")])
    return _answer_payload(out, ref, body, path)


@click.command(short_help="A large result, or a file that a call left, as bytes.")
@at_server(_payload_at_server)
@click.argument("name", metavar="ID")
@click.option("--out", "path", type=click.Path(), metavar="FILE", help="Write it there; never over a file.")
@as_holder
@over_home
async def payload(app: Interlock, out: Output, /, name: str, path: str | None, token: str | None) -> int:
    """A result of yours that was too large to be shown, or a file that a call of yours left, byte for byte.

    ID is the call, or the reference that its result names: payload:01JC… for a result, payload:01JC….1 for a file.

    \b
    interlock calls payload 01JCXK2M4Q8Z… | jq .
    interlock calls payload payload:01JCXK2M4Q8Z….1 --out chart.png
    """
    ref, body = await _read(app, name, await acting(app, token))
    return _answer_payload(out, ref, body, path)


def _answer_payload(out: Output, ref: str, body: bytes, path: str | None) -> int:
    from interlock.call.artifacts import is_file

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


async def _read(app: Interlock, name: str, caller: Caller) -> tuple[str, bytes]:
    """The payload of a reference or a call. A file is returned only if it matches the record of its call."""
    from interlock.api.history import find
    from interlock.call.artifacts import is_file
    from interlock.cli import artifacts

    if not name.startswith("payload:"):
        name = await app.records.payload_of(name, by=caller)
    body = await app.read_payload(name, caller=caller)
    if is_file(name):
        history = await find(app, name[len("payload:") :].partition(".")[0])
        artifacts.check({one: body for one in history.artifacts if one.ref == name})
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


# Parts

Span = tuple[int | None, int | None]


async def _part_at_server(server: Server, out: Output, /, name: str, span: Span, **given: Any) -> int:
    from interlock.cli.remote import part

    ref = part(_reference(name))
    asked = {"at": given["at"], "q": given["query"], "start": span[0], "stop": span[1], "tokens": given["tokens"]}
    return _answer_part(out, await server.get(f"/v1/payloads/{ref}/part", **asked))


def _span(_: click.Context, __: click.Parameter, value: str | None) -> Span:
    start, colon, stop = (value or ":").partition(":")
    if not colon or not all(re.fullmatch(r"-?[0-9]{0,12}", one) and one != "-" for one in (start, stop)):
        raise click.BadParameter("write it FROM:TO, such as 0:100, :20 or -5:")
    return int(start) if start else None, int(stop) if stop else None


@click.command("part")
@at_server(_part_at_server)
@click.argument("name", metavar="ID")
@click.option("--at", default="", metavar="POINTER", help="A JSON pointer, such as /items/0.")
@click.option("--query", default="", metavar="JMESPATH", help="An expression, such as items[].name.")
@click.option("--range", "span", callback=_span, metavar="FROM:TO", help="Items of a list, or characters of a text.")
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Cut it to so many tokens; it stays JSON.")
@as_holder
@over_home
async def part_of_result(app: Interlock, out: Output, /, name: str, span: Span, token: str | None, **given: Any) -> int:
    """A part of a result of yours that was too large to be shown.

    ID is the call, or the reference that its result names. The options apply in the order in which they are listed.

    \b
    interlock calls part 01JCXK2M4Q8Z… --at /items --range 0:20
    interlock calls part 01JCXK2M4Q8Z… --query 'items[?price > `10`].name' --tokens 500
    """
    from interlock.window.reading import Part

    caller = await acting(app, token)
    part = Part(given["at"], given["query"], *span, given["tokens"])
    return _answer_part(out, await app.read_part(_reference(name), part, caller=caller))


def _reference(name: str) -> str:
    return name if name.startswith("payload:") else f"payload:{name}"


def _answer_part(out: Output, document: Json) -> int:
    import json

    value = document["value"]
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)

    def show(page: Page) -> None:
        for line in text.split("\n"):
            page.line(line)

    out.answer(document, show)
    return 0
