"""The interface to an upstream that offers more than tools: resources and prompts.

They are listed, read and watched for clients, and never run: only tools are called.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from interlock.call.connector import Connector, Interaction

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.data.schema import Json


class Content(Protocol):
    """The resources and prompts of one upstream, in the words of the Model Context Protocol."""

    def list_resources(self) -> Coroutine[Any, Any, list[Json]]: ...

    def list_resource_templates(self) -> Coroutine[Any, Any, list[Json]]: ...

    def list_prompts(self) -> Coroutine[Any, Any, list[Json]]: ...

    def read_resource(
        self, uri: str, interaction: Interaction, caller: Caller | None, /
    ) -> Coroutine[Any, Any, Json]: ...

    def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None, interaction: Interaction, caller: Caller | None, /
    ) -> Coroutine[Any, Any, Json]: ...

    def complete(self, ref: Json, argument: Json, context: Json | None, /) -> Coroutine[Any, Any, Json]: ...

    def watch(self, uri: str, on_change: Callable[[], None], /) -> Coroutine[Any, Any, None]:
        """Call `on_change` once the upstream agreed to report changes of a resource, and then at every change."""
        ...


@runtime_checkable
class ContentConnector(Connector, Protocol):
    """The connector of an upstream that offers resources and prompts."""

    @property
    def content(self) -> Content: ...

    def attend(self, hear: Callable[[str], None], /) -> None:
        """Call `hear` with the list that changed: tools, resources or prompts."""
        ...
