"""Tools of an office, for search and selection."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from interlock import Field, Interlock, Tool, tool
from tests.support.calls import admit

Value = Annotated[str, Field(description="a value", examples=["x"])]


def some_tool(name: str, text: str, **options: Any) -> Tool[..., Any]:
    async def function(value: Value) -> str:
        return f"{name} {value}"

    function.__name__, function.__doc__ = name, text
    facts: dict[str, Any] = {
        "version": "1.0.0",
        "mutation_class": "read_only",
        "namespace": "office",
        "external_io": False,
        **options,
    }
    return tool(**facts)(function)


TOOLS = [
    some_tool("send_email", "Send an email message to a recipient."),
    some_tool("create_invoice", "Write an invoice for goods that a customer ordered."),
    some_tool("forecast", "Weather of the next seven days in a city."),
    some_tool("translate", "Translate a text into another language."),
    some_tool("run_query", "Run an SQL query on the database of orders.", estimated_cost=2.0),
]


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        await admit(app, *TOOLS)
        await app.catalog.forget()
        yield app


OFFERED = [
    some_tool("send_email", "Send an email message to a recipient."),
    some_tool("create_invoice", "Write an invoice for goods that a customer ordered."),
    some_tool("forecast", "Weather of the next seven days in a city."),
    some_tool("translate", "Translate a text into another language."),
    some_tool("delete_file", "Delete a file from a folder."),
]
