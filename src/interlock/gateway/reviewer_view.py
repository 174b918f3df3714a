"""Calls as their reviewers may see them: names and addresses stay, credentials and private values do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from interlock.data.bounds import Shortener
from interlock.privacy.redact import Redactor, without_credentials
from interlock.privacy.scrub import scrub

if TYPE_CHECKING:
    from interlock.call.phases import Call
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json
    from interlock.gateway.redaction import CallRedaction

_MOST_SHOWN = 1 << 16
_LONGEST_SHOWN = 30_000


class ReviewerView:
    """Redacts and shortens what reviewers are shown."""

    def __init__(self, redactor: Redactor, redaction: CallRedaction) -> None:
        self._redactor = redactor
        self._redaction = redaction

    def input(self, call: Call, arguments: Mapping[str, Any]) -> Json:
        """Return an input as a reviewer may see it: without what its schema or its name declares private.

        A very long input is cut, and each cut says how much is missing.
        """
        shown = self._redaction.input_redactor(call).for_people(dict(arguments)).value
        return cast("Json", self._shortened(list(call.more.hidden), shown))

    def preview(self, call: Call, preview: Json) -> Json:
        """Return a preview as a reviewer may see it: names and addresses stay, private values of the input do not."""
        return cast("Json", self._shortened(self._redaction.private_values(call), preview))

    def comment(self, text: str) -> str:
        """Return a comment of a person about a call, without credentials."""
        return without_credentials(self._redactor, text)

    def private_arguments(self, contract: Contract, *arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of arguments that are or hold something private, by a mark of the schema or by a name."""
        redactor = self._redactor.for_schema(contract.input.document)
        found = (path for one in arguments for path in redactor.for_people(dict(one)).paths)
        return sorted({path.split("/")[1] for path in found})

    def _shortened(self, private: list[str], value: Any) -> Any:
        # Known secrets first: cutting could leave half of one, which would not be recognised.
        return self._without_credentials(_shortener().shorten(scrub(value, private)[0]))

    def _without_credentials(self, value: Any) -> Any:
        if isinstance(value, str):
            return without_credentials(self._redactor, value)
        if isinstance(value, dict):
            return {name: self._without_credentials(item) for name, item in cast("Json", value).items()}
        if isinstance(value, list | tuple):
            return [self._without_credentials(item) for item in cast("list[Any]", value)]
        return value


def _shortener() -> Shortener:
    """Return what shortens texts for people, so far that the search for credentials does not cut them again."""
    return Shortener(characters=_MOST_SHOWN, longest=_LONGEST_SHOWN)
