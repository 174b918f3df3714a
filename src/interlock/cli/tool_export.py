"""`interlock tools export`: tools as model providers take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_rest, at_server, looking
from interlock.cli.completion import tool_names
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server

Json = dict[str, Any]
_ALL = 1 << 31


async def _export_at_server(
    server: Server, out: Output, /, names: tuple[str, ...], provider: str, *, strict: bool
) -> int:
    asked = {"provider": provider, "strict": strict, "tool": names or None, "limit": 500}
    return out.answer_indented(await pages(server, "/v1/tools/declarations", **asked))


async def pages(server: Server, path: str, **query: Any) -> list[Json]:
    """The tools of all pages."""
    found: list[Json] = []
    cursor: str | None = None
    while True:
        page = await server.get(path, cursor=cursor, **query)
        found += page["tools"]
        cursor = page["cursor"]
        if cursor is None:
            return found


def _export_at_rest(
    reader: Reader, out: Output, /, names: tuple[str, ...], provider: Any, *, strict: bool
) -> int | None:
    from interlock.api.parts_at_rest import declarations

    document = declarations(reader, out.session.path, provider, names, _ALL, strict=strict)
    return None if document is None else out.answer_indented(document)


@click.command(short_help="Tools as OpenAI, Anthropic or Gemini take them.")
@at_server(_export_at_server)
@at_rest(_export_at_rest)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=tool_names)
@click.option(
    "--format", "provider", type=click.Choice(["openai-chat", "openai-responses", "anthropic", "gemini"]),
    required=True, help="The provider whose format to use.",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="The strict form, where a tool's schema has one.")
@looking
async def export(app: Interlock, out: Output, /, names: tuple[str, ...], provider: Any, *, strict: bool) -> int:
    """Tools as OpenAI, Anthropic or Gemini take them: the `tools` of a request.

    POST /v1/tools/calls takes a tool call of the model as it came, makes it, and returns the message for the
    conversation.

    \b
    interlock tools export --format anthropic > tools.json
    interlock tools export --format openai-chat --strict demo.balance
    """
    from interlock.api.declarations import Declarations

    document, _ = await Declarations(app, app.tools).declarations(
        provider, app.caller, strict=strict, names=names, limit=_ALL
    )
    return out.answer_indented(document)
