"""Redaction of what leaves a call: texts, data and failures without the private values of the call.

Private values are credentials that were lent to the call, values that were handed to it as private, and arguments that
their schema or their name declares private. They are searched for in everything that the tool says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from interlock.core.errors import Failure
from interlock.data.bounds import Shortener, size_of
from interlock.privacy.redact import (
    REDACTED,
    Redactor,
    SchemaRedactor,
    private_values,
    safe_log,
    safe_message,
)
from interlock.privacy.scrub import scrub

if TYPE_CHECKING:
    from interlock.call.phases import Call
    from interlock.data.schema import Json

# Only the beginning of a longer text is searched. It is far longer than what is shown, so no credential is cut in two.
LONGEST_TEXT = 1 << 18
_NUMBERS = frozenset((int, float, bool))
MOST_PRIVATE = 500


class CallRedaction:
    """Redacts what leaves calls."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._input_redactors: dict[str, SchemaRedactor] = {}

    def has_private_values(self, call: Call) -> bool:
        """Whether a call has private values, which must not leave it."""
        if call.more.lease is not None or call.more.hidden:
            return True
        return call.tool is not None and (call.tool.input_redactor or self.input_redactor(call)).guarded

    def private_values(self, call: Call) -> list[str]:
        """Return the private values of a call: lent credentials, values handed to it, and private arguments."""
        found = [*call.more.hidden, *(() if call.more.lease is None else call.more.lease.values())]
        if call.tool is not None and (call.tool.input_redactor or self.input_redactor(call)).guarded:
            for given in _given(call):
                found.extend(self._private_in(call, given, for_people=True))
        return found

    def check_private_values(self, call: Call) -> None:
        """Refuse (E3004) a call with very many private values, because each is searched for in all its output."""
        if len(set(self.private_values(call))) > MOST_PRIVATE:
            raise Failure(
                "E3004",
                f"the call holds more than {MOST_PRIVATE:,} private values",
                details={"mostPrivateValues": MOST_PRIVATE},
                resolution="send fewer passwords, tokens and the like per call",
            )

    def without_private_values(self, call: Call, value: Any, keep: Collection[str] = ()) -> Any:
        """Return data of a tool without the private values of the call. Member names in `keep` are known anyway."""
        if call.more.lease is not None and call.more.lease.closed:
            return REDACTED
        return scrub(value, self.private_values(call), keep)[0]

    def _private_in(self, call: Call, given: Any, *, for_people: bool) -> list[str]:
        # INVARIANT: where it cannot be told what is private in an input, nothing of the call's making is shown: E3304.
        if not given:
            return []
        return private_values(self.input_redactor(call), given if for_people else _short(given), for_people=for_people)

    def _private(self, call: Call) -> list[str]:
        if call.tool is None:
            return []
        return [text for one in _given(call) for text in self._private_in(call, one, for_people=False)]

    def input_redactor(self, call: Call) -> SchemaRedactor:
        """Return the redactor that knows which parts of a call's input are private; compiled once for each version."""
        tool = call.tool
        assert tool is not None
        found = tool.input_redactor or self._input_redactors.get(tool.digest)
        if found is None:
            found = self._input_redactors[tool.digest] = self._redactor.for_schema(tool.contract.input.document)
        tool.input_redactor = found
        return found

    def redact_text(self, call: Call, text: str) -> str:
        """Return a text of a tool without credentials, personal data and the private values of the call."""
        return self.text_redactor(call)(text)

    def text_redactor(self, call: Call) -> Callable[[str], str]:
        """Return a function that does the same for several texts. The private values are collected once."""
        if call.more.lease is not None and call.more.lease.closed:
            return lambda _: REDACTED  # the values of a closed lease are gone, so they cannot be searched for
        hidden, private = self.private_values(call), self._private(call)
        return lambda text: _redact_text(self._redactor, text, hidden, private)

    def redact_data(self, call: Call, value: Any) -> Any:
        """Return data that no output schema describes, without private values."""
        if call.more.lease is not None and call.more.lease.closed:
            return REDACTED
        short, hidden = Shortener().shorten(value), self.private_values(call)
        shown = _redact_all(self._redactor, self._redactor.value(short).value, hidden, self._private(call))
        return scrub(shown, hidden)[0]

    def redact_texts(self, call: Call, texts: Sequence[str]) -> list[str]:
        """Return texts about a call, such as those of hooks, without private values."""
        return [str(self.redact_data(call, text)) for text in texts]

    def redact_failure(self, call: Call, failure: Failure) -> Failure:
        """Return a failure of Interlock without the private values that it may quote."""
        if not self.has_private_values(call):
            return failure
        details = None if failure.details is None else self.without_private_values(call, dict(failure.details))
        return Failure(failure.code, self.without_private_values(call, failure.message), details=details)

    def recordable_resources(self, call: Call, resources: Sequence[str]) -> tuple[str, ...] | None:
        """Return the resources of a call as they may be recorded; None if one contains a private value.

        A part of a name would be the name of another resource.
        """
        private = self.private_values(call) if call.more.private else []
        if private and any(scrub(one, private)[0] != one for one in resources):
            return None
        return None if any(map(self._redactor.has_credential, resources)) else tuple(resources)


def _redact_text(redactor: Redactor, text: str, hidden: list[str], private: list[str]) -> str:
    text = scrub(text[:LONGEST_TEXT], hidden)[0]
    for value in private:
        text = text.replace(value, REDACTED)
    return safe_log(redactor, text)


def _redact_all(redactor: Redactor, value: Any, hidden: list[str], private: list[str]) -> Any:
    if isinstance(value, str):
        return safe_message(redactor, _redact_text(redactor, value, hidden, private))
    if isinstance(value, dict):
        members = cast("Json", value).items()
        return {scrub(name, hidden)[0]: _redact_all(redactor, item, hidden, private) for name, item in members}
    if isinstance(value, list | tuple):
        return [_redact_all(redactor, item, hidden, private) for item in cast("list[Any]", value)]
    return value


def _short(value: Any) -> Any:
    """Return data without its longest texts, which no text that is searched for private values can contain."""
    return value if size_of(value, LONGEST_TEXT) <= LONGEST_TEXT else _without_long_texts(value)


def _without_long_texts(value: Any) -> Any:
    if isinstance(value, str):
        return "" if len(value) > LONGEST_TEXT else value
    if isinstance(value, dict):
        members = cast("Json", value).items()
        return {name: item if item.__class__ in _NUMBERS else _without_long_texts(item) for name, item in members}
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return [item if item.__class__ in _NUMBERS else _without_long_texts(item) for item in items]
    return value


def _given(call: Call) -> tuple[Any, ...]:
    """Return the input of a call: as it was sent and, if validation changed it, as it is used."""
    sent = call.request.arguments
    return (sent,) if call.input is sent else (sent, call.input)
