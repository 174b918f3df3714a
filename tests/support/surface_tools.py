"""Tools of an office, for tests of surfaces."""

from __future__ import annotations

from typing import Annotated, Any

from interlock import Field, Tool, tool

Value = Annotated[str, Field(description="a value", examples=["x"])]


def offer(name: str, text: str, namespace: str = "office", **more: Any) -> Tool[..., Any]:
    """A tool that reads, and says its name."""

    async def function(value: Value) -> str:
        return f"{name} {value}"

    function.__name__, function.__doc__ = name, text
    return tool(version="1.0.0", mutation_class="read_only", namespace=namespace, external_io=False, **more)(function)


TOOLS = [
    offer("send_email", "Send an email message to a recipient."),
    offer("create_invoice", "Write an invoice for goods that a customer ordered."),
    offer("forecast", "Weather of the next seven days in a city."),
    offer("translate", "Translate a text into another language."),
]
