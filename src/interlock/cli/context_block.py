"""The result of a call as a model gets it: `interlock call --tokens N`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from interlock.api.model_window import pointer_to, views_of
from interlock.cli.remote import part
from interlock.window.budget import LEAST_RESERVE, Window
from interlock.window.levels import WEIGHTS
from interlock.window.tokens import estimate

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.call.results import Result
    from interlock.cli.output import Output
    from interlock.cli.remote import Server


async def answer_block(app: Interlock, out: Output, result: Result, tokens: int) -> int:
    """Print a result as a block of a model's context."""
    window = await app.window(tokens + LEAST_RESERVE)
    routed = await window.admit(result)
    return _print(out, result, routed.context, routed.level, routed.tokens)


async def answer_from_server(server: Server, out: Output, result: Result, tokens: int) -> int:
    """The same of a result that a server gave. Its tokens are estimated: the counter of the server is not known."""
    ref, schema = result.persistence.ref, None
    if result.ok:
        name, _, version = result.tool.partition("@")
        schema = (await server.get(f"/v1/tools/{part(name)}", version=version)).get("result_schema")
        if ref is not None:
            result = replace(result, value=(await server.get(f"/v1/payloads/{part(ref)}/part"))["value"])
    pointer = None if ref is None else pointer_to(result, ref, estimate)
    window = Window(tokens + LEAST_RESERVE)
    view = window.admit(result.invocation_id, views_of(result, estimate, schema), pointer, WEIGHTS["normal"])
    if view is None:
        return _print(out, result, None, None, 0)
    return _print(out, result, view.text, view.level, view.tokens)


def _print(out: Output, result: Result, context: str | None, level: int | str | None, tokens: int) -> int:
    out.answer({"context": context, "level": level, "tokens": tokens}, lambda _: click.echo(context or "", nl=False))
    return 0 if result.ok and context is not None else 1
