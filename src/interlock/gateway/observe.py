"""Observation of calls while they run: events, progress, partial results, alerts, metrics and spans.

Everything that leaves this module is redacted: it contains no private value of the call.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from interlock.approvals import tickets
from interlock.call.events import Event, Listener
from interlock.call.phases import Call, ResultPart, Source
from interlock.contract.contract import Contract
from interlock.contract.standard.states import State
from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.seldom import Seldom
from interlock.data.bounds import Shortener, size_of
from interlock.data.schema import Json
from interlock.privacy.redact import (
    REDACTED,
    Redactor,
    SchemaRedactor,
    private_values,
    safe_log,
    safe_message,
    without_credentials,
)
from interlock.privacy.scrub import scrub
from interlock.store import tickets as stored
from interlock.store.port import Reader
from interlock.telemetry.metrics import Approvals
from interlock.telemetry.setup import Telemetry
from interlock.telemetry.trace import Recording, progress_facts

_log = logging.getLogger("interlock.gateway")
_LONGEST_REASONS = 8000
# Only the beginning of a longer text is searched. It is far longer than what is shown, so no credential is cut in two.
_LONGEST_TEXT = 1 << 18
# Characters of a failure in the log when it was logged in full less than a minute ago.
_LONGEST_LINE = 200
_NUMBERS = frozenset((int, float, bool))
_MOST_SHOWN = 1 << 16
# After so many failures in a row, an alert says that a tool fails.
FAILING_AFTER = 30
# The same failure is logged with its traceback, and the same trouble of the store alerted, once in this time.
TELL_EVERY_S = 60.0
_STORE = frozenset(("E3801", "E3803"))
_LONGEST_SHOWN = 30_000
MOST_PRIVATE = 500
_COUNTS = ("total_steps", "bytes_read", "bytes_written", "line_count")


class Observer:
    """Notifies listeners. Costs nothing while nobody listens."""

    def __init__(self, clock: Clock, redactor: Redactor, telemetry: Telemetry) -> None:
        self._clock = clock
        self._redactor = redactor
        self._alerts = telemetry.alerts
        self._count = telemetry.metrics.closed
        self._failures_in_a_row = telemetry.metrics.failures_in_a_row
        self._seldom = Seldom(TELL_EVERY_S, clock.monotonic)
        self.listeners: list[Listener] = []
        # Listeners of one call each.
        self.followers: dict[str, list[Listener]] = {}
        self._numbers = itertools.count(1)
        self._sinks: dict[str, SchemaRedactor] = {}
        self.metrics: Counter[str] = telemetry.metrics.signals

    def emit(self, kind: str, call: Call, **data: Any) -> None:
        """Emit one event of a call."""
        if not self.heard(call):
            return
        event_id = f"{call.id}:{next(self._numbers)}"
        now_ms = self._clock.now_ms()
        self._tell_all(Event(id=event_id, type=kind, invocation_id=call.id, tool=call.ref, at_ms=now_ms, data=data))

    def heard(self, call: Call) -> bool:
        """Whether anybody listens to the events of a call."""
        return bool(self.listeners) or call.id in self.followers

    def follow(self, call_id: str, listener: Listener) -> Callable[[], None]:
        """Add a listener for one call. Returns a function that removes it."""
        theirs = self.followers.setdefault(call_id, [])
        theirs.append(listener)

        def stop() -> None:
            theirs.remove(listener)
            if not theirs:
                self.followers.pop(call_id, None)

        return stop

    def _tell_all(self, event: Event) -> None:
        for listener in (*self.listeners, *self.followers.get(event.invocation_id, ())):
            self._tell(listener, event)

    def _tell(self, listener: Callable[[Any], None], what: Any) -> None:
        """Call one listener. An exception of the listener does not affect the call."""
        try:
            listener(what)
        except BaseException:  # noqa: BLE001 - a listener is other people's code; even its SystemExit is its own
            _log.exception("a listener failed")

    def alert(self, name: str, call: Call, **facts: Any) -> None:
        """Emit an alert for operators."""
        self.metrics[name] += 1
        severity = self._alerts.fire(name, tool=call.ref, invocation_id=call.id, trace_id=call.trace_id, facts=facts)
        if isinstance(call.more.span, Recording):
            call.more.span.event("tool.alert", alert=name, severity=severity)
        self.emit("tool.alert", call, alert=name, **facts)

    def closed(
        self, call: Call, metadata: Mapping[str, Any], source: Source = "compute", failure: Failure | None = None
    ) -> None:
        """Count a call that has ended and is on record."""
        self._count(call, metadata, source, failure)
        if failure is not None:
            self._note_failure(call, failure)
        if call.started >= self._alerts.due:
            self._alerts.look()
        if call.more.span is not None and isinstance(call.more.span, Recording):
            call.more.span.cost, call.more.span.source = metadata.get("cost", 0.0), source

    def _note_failure(self, call: Call, failure: Failure) -> None:
        """Alert if a failure concerns more than one call: the store cannot be written, or a tool only fails."""
        if failure.code in _STORE:
            if self._seldom.due((failure.code, failure.message)) is not None:
                self.alert("STORE_UNWRITABLE", call, reason=f"{failure.message}; {failure.resolution}")
        elif call.tool is not None and call.launched and call.state != "canceled":
            failures = self._failures_in_a_row(call.tool)
            if failures == FAILING_AFTER:
                reason = f"it failed {failures} times in a row, the last time with {failure.code}"
                self.alert("TOOL_FAILING", call, reason=reason, failures=failures)

    def hide(self, call: Call, text: str) -> str:
        """Return a text of a tool without credentials, personal data and the private values of the call."""
        return self._hider(call)(text)

    def _hider(self, call: Call) -> Callable[[str], str]:
        """Return a function that does the same for several texts. The private values are collected once."""
        if call.more.lease is not None and call.more.lease.closed:
            return lambda _: REDACTED  # the values of a closed lease are gone, so they cannot be searched for
        hidden, private = self.hidden(call), self._private(call)
        return lambda text: self._hide_text(text, hidden, private)

    def _hide_text(self, text: str, hidden: list[str], private: list[str]) -> str:
        text = scrub(text[:_LONGEST_TEXT], hidden)[0]
        for value in private:
            text = text.replace(value, REDACTED)
        return safe_log(self._redactor, text)

    def hides(self, call: Call) -> bool:
        """Whether a call has private values, which must not leave it."""
        if call.more.lease is not None or call.more.hidden:
            return True
        return call.tool is not None and (call.tool.sink or self.sink(call)).guarded

    def hidden(self, call: Call) -> list[str]:
        """Return the private values of a call: lent credentials, values handed to it, and private arguments."""
        found = [*call.more.hidden, *(() if call.more.lease is None else call.more.lease.values())]
        if call.tool is not None and self.sink(call).guarded:
            for given in _given(call):
                found.extend(self._private_in(call, given, for_people=True))
        return found

    def check_private(self, call: Call) -> None:
        """Refuse (E3004) a call with very many private values, because each is searched for in all its output."""
        if len(set(self.hidden(call))) > MOST_PRIVATE:
            raise Failure(
                "E3004",
                f"the call holds more than {MOST_PRIVATE:,} private values",
                details={"mostPrivateValues": MOST_PRIVATE},
                resolution="send fewer passwords, tokens and the like per call",
            )

    def without(self, call: Call, value: Any, keep: Collection[str] = ()) -> Any:
        """Return data of a tool without the private values of the call. Member names in `keep` are known anyway."""
        if call.more.lease is not None and call.more.lease.closed:
            return REDACTED
        return scrub(value, self.hidden(call), keep)[0]

    def _private_in(self, call: Call, given: Any, *, for_people: bool) -> list[str]:
        # INVARIANT: where it cannot be told what is private in an input, nothing of the call's making is shown: E3304.
        if not given:
            return []
        return private_values(self.sink(call), given if for_people else _short(given), for_people=for_people)

    def _private(self, call: Call) -> list[str]:
        if call.tool is None:
            return []
        return [text for one in _given(call) for text in self._private_in(call, one, for_people=False)]

    def private_arguments(self, contract: Contract, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of arguments that are private, by a mark of the schema or by their name."""
        found = self._redactor.for_schema(contract.input.document).for_people(dict(arguments)).paths
        return sorted({path.split("/")[1] for path in found})

    def remark(self, text: str) -> str:
        """Return a comment of a person about a call, without credentials."""
        return without_credentials(self._redactor, text)

    def sink(self, call: Call) -> SchemaRedactor:
        """Return the redactor that knows which parts of a call's input are private; compiled once for each version."""
        tool = call.tool
        assert tool is not None
        found = tool.sink or self._sinks.get(tool.digest)
        if found is None:
            found = self._sinks[tool.digest] = self._redactor.for_schema(tool.contract.input.document)
        tool.sink = found
        return found

    def clean(self, call: Call, failure: Failure) -> Failure:
        """Return a failure of a tool without paths, secrets and stack. The log has the rest."""
        hide = self._hider(call)
        message = safe_message(self._redactor, hide(failure.message))
        details = None if failure.details is None else self.shown(call, dict(failure.details))
        if isinstance(failure.__cause__, Exception) and not isinstance(failure.__cause__, Failure):
            self.log_failure(call, f"{call.ref} failed", failure.__cause__)
        elif message != failure.in_full or details != failure.details_in_full:
            # A failure of one kind is searched and logged in full once a minute. Otherwise the log has the beginning of
            # what the caller is shown.
            what, told = f"{call.ref} failed", message[:_LONGEST_LINE]
            if (held_back := self._seldom.due((call.ref, failure.code))) is not None:
                told = hide(f"{failure.in_full[:_LONGEST_TEXT]} {dict(failure.details_in_full or {}) or ''}")
                what = _with_count(what, held_back)
            extra = {"trace_id": call.trace_id, "invocation_id": call.id}
            _log.warning("%s in call %s: %s", what, call.id, _writable(told), extra=extra)
        if _log.isEnabledFor(logging.DEBUG):
            self._log_reasons(call, failure)
        if details == REDACTED:
            details = {"withheld": REDACTED}
        return Failure(
            failure.code,
            message,
            details=details,
            retryable=failure.retryable,
            retry_after_ms=failure.retry_after_ms,
            native_error_ref=None if failure.native_error_ref is None else hide(failure.native_error_ref),
            policy_refs=tuple(map(hide, failure.policy_refs)),
            evidence_refs=tuple(map(hide, failure.evidence_refs)),
            resolution=failure.resolution,
            unsettled=failure.unsettled,
        )

    def _log_reasons(self, call: Call, failure: Failure) -> None:
        """Log the causes of a failure and the notes on it, at debug level."""
        reasons: list[str] = []
        behind: BaseException | None = failure
        while isinstance(behind, Failure):
            reasons += getattr(behind, "__notes__", ())
            behind = behind.__cause__ or behind.__context__
        if isinstance(behind, Exception) and behind is not failure.__cause__:  # which was logged
            reasons += traceback.format_exception_only(behind)
        if reasons:
            extra = {"trace_id": call.trace_id, "invocation_id": call.id}
            told = self.hide(call, "\n".join(reason.rstrip() for reason in reasons))[-_LONGEST_REASONS:]
            _log.debug("behind the failure of %s in call %s\n%s", call.ref, call.id, _writable(told), extra=extra)

    def bare(self, call: Call, failure: Failure) -> Failure:
        """Return a failure of Interlock without the private values that it may quote."""
        if not self.hides(call):
            return failure
        details = None if failure.details is None else self.without(call, dict(failure.details))
        return Failure(failure.code, self.without(call, failure.message), details=details)

    def shown(self, call: Call, value: Any) -> Any:
        """Return data that no output schema describes, without private values."""
        if call.more.lease is not None and call.more.lease.closed:
            return REDACTED
        short, hidden = Shortener().shorten(value), self.hidden(call)
        shown = self._hide_all(self._redactor.value(short).value, hidden, self._private(call))
        return scrub(shown, hidden)[0]

    def resources(self, call: Call, found: Sequence[str]) -> tuple[str, ...] | None:
        """Return the resources of a call as they may be recorded; None if one contains a private value.

        A part of a name would be the name of another resource.
        """
        private = self.hidden(call) if self.hides(call) else []
        if private and any(scrub(one, private)[0] != one for one in found):
            return None
        clean = self._redactor
        return tuple(found) if all(without_credentials(clean, one) == one for one in found) else None

    def shown_input(self, call: Call, arguments: Mapping[str, Any]) -> Json:
        """Return an input as a reviewer may see it: without what its schema or its name declares private.

        A very long input is cut, and each cut says how much is missing.
        """
        shown = self.sink(call).for_people(dict(arguments)).value
        return cast("Json", self._for_people(list(call.more.hidden), shown))

    def for_reviewer(self, call: Call, preview: Json) -> Json:
        """Return a preview as a reviewer may see it: names and addresses stay, private values of the input do not."""
        return cast("Json", self._for_people(self.hidden(call), preview))

    def _for_people(self, private: list[str], value: Any) -> Any:
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

    def announce(self, kind: str, invocation_id: str, tool: str, **data: Any) -> None:
        """Emit an alert that concerns no call that this process runs."""
        name = str(data.get("alert", kind))
        self.metrics[name] += 1
        self._alerts.fire(name, tool=tool, invocation_id=invocation_id, facts=data)
        self.mention(kind, invocation_id, tool, **data)

    def surface_changed(self, revision: int) -> None:
        """Announce that the set of tools that can be listed and called has changed."""
        if self.listeners:
            now_ms, number = self._clock.now_ms(), next(self._numbers)
            kind, data = "tool.surface.updated", {"revision": revision}
            event = Event(id=f"{kind}:{number}", type=kind, invocation_id="", tool="", at_ms=now_ms, data=data,
                          surface="tools")  # fmt: skip
            self._tell_all(event)

    def mention(self, kind: str, invocation_id: str, tool: str, **data: Any) -> None:
        """Emit an event of a call that no task of this process runs."""
        event_id = f"{invocation_id or kind}:{next(self._numbers)}"
        now_ms = self._clock.now_ms()
        self._tell_all(Event(id=event_id, type=kind, invocation_id=invocation_id, tool=tool, at_ms=now_ms, data=data))

    def _hide_all(self, value: Any, hidden: list[str], private: list[str]) -> Any:
        if isinstance(value, str):
            return safe_message(self._redactor, self._hide_text(value, hidden, private))
        if isinstance(value, dict):
            members = cast("Json", value).items()
            return {scrub(name, hidden)[0]: self._hide_all(item, hidden, private) for name, item in members}
        if isinstance(value, list | tuple):
            return [self._hide_all(item, hidden, private) for item in cast("list[Any]", value)]
        return value

    def breaker_changed(self, service: str, before: str, after: str) -> None:
        """Alert that the circuit breaker of a service opened or closed."""
        if after != "half_open":
            facts = {"alert": "SERVICE_BREAKER", "service": service, "from": before, "to": after}
            self.announce("tool.alert", "", "", **facts)

    def log_failure(self, call: Call, what: str, error: BaseException) -> None:
        """Log an unexpected failure in full, without private values.

        The same failure, by the place where it was raised, is logged in full once a minute and in one line otherwise.
        """
        extra = {"trace_id": call.trace_id, "invocation_id": call.id}
        held_back = self._seldom.due((what, type(error), _place(error)))
        if held_back is None:
            _log.error("%s in call %s: %s, as before", what, call.id, type(error).__name__, extra=extra)
            return
        what = _with_count(what, held_back)
        try:
            trace = self.hide(call, _traced(error))
        except Exception:  # noqa: BLE001 - what cannot be looked through is not logged; that it failed is
            trace = f"{type(error).__name__}; the rest could not be searched for private data"
        _log.error("%s in call %s\n%s", what, call.id, _writable(trace), extra=extra)

    def progress(self, call: Call, facts: Json) -> None:
        """Pass on a progress record: numbered without gaps, never above 100 percent, never after the end."""
        if call.ended or call.more.why is not None:
            return
        call.extend().progress += 1
        if call.request.on_progress is None and not self.heard(call) and not isinstance(call.more.span, Recording):
            return  # nobody listens
        shown = self.shown(call, facts)
        record = _progress_record(call, cast("Json", shown) if isinstance(shown, dict) else {}, facts.get("percent"))
        record["elapsed_ms"] = round((self._clock.monotonic() - call.started) * 1000, 3)
        record["timestamp"] = iso(self._clock.now_ms())
        if isinstance(call.more.span, Recording):
            call.more.span.event("tool.invocation.progress", **progress_facts(record))
        if call.request.on_progress is not None:
            self._tell(call.request.on_progress, record)
        self.emit("tool.invocation.progress", call, **record)

    def partial(self, call: Call, value: Any, *, yielded: bool = False) -> None:
        """Pass on a part of the result. Parts are ordered and never replace the final result."""
        if call.ended or call.more.why is not None:
            return
        if call.state == "yielded":
            call.move("running")
        state: State = "yielded" if yielded else "partial_result"
        call.move(state)
        call.extend().parts.append(ResultPart(value, yielded))
        index = len(call.more.parts)
        self.emit(f"tool.invocation.{state}", call, index=index, ref=_part_ref(call, index), value=value)


def _progress_record(call: Call, said: Json, percent: Any) -> Json:
    """Return a progress record with every field of `tool_progress`. Values of the wrong type become null or empty.

    `partial_result_refs` names the latest part; parts are numbered from 1, so it also tells how many there are.
    """
    parts = len(call.more.parts)
    step = said.get("current_step")
    return {
        **said,
        "schema_version": "0.2.0",
        "progress_id": f"{call.id}:{call.more.progress}",
        "invocation_id": call.id,
        "sequence": call.more.progress,
        "status": call.state,
        "message": str(said.get("message", "")),
        "percent": None if percent is None else max(0.0, min(100.0, float(percent))),
        "current_step": step if isinstance(step, str) else _count(step),
        **{name: _count(said.get(name)) for name in _COUNTS},
        "partial_result_refs": [_part_ref(call, parts)] if parts else [],
        "artifact_refs": _texts(said.get("artifact_refs")),
    }


def _part_ref(call: Call, index: int) -> str:
    """Return the name of a part of a result, in its event and in progress records."""
    return f"{call.id}:part:{index}"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _texts(value: Any) -> list[str]:
    found = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return [one for one in found if isinstance(one, str)]


def _shortener() -> Shortener:
    """Return what shortens texts for people, so far that the search for credentials does not cut them again."""
    return Shortener(characters=_MOST_SHOWN, longest=_LONGEST_SHOWN)


def _traced(error: BaseException) -> str:
    """Return an error with its stack. A very long message is cut first, because formatting walks each line."""
    words = str(error)
    if len(words) <= _LONGEST_REASONS:
        return "".join(traceback.format_exception(error))
    stack = "".join(traceback.format_tb(error.__traceback__))
    return f"{stack}{type(error).__name__}: {words[:_LONGEST_REASONS]}… [{len(words):,} characters]"


def _writable(text: str) -> str:
    """Return a text for the log. Lone surrogates are escaped, because no handler could encode them."""
    return text.encode(errors="backslashreplace").decode()


def _with_count(what: str, held_back: int) -> str:
    return f"{what} ({held_back} more since it was last told in full)" if held_back else what


def _place(error: BaseException) -> tuple[str, int]:
    """Return where an error was raised: the file and the line."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def _short(value: Any) -> Any:
    """Return data without its longest texts, which no text that is searched for private values can contain."""
    return value if size_of(value, _LONGEST_TEXT) <= _LONGEST_TEXT else _without_long_texts(value)


def _without_long_texts(value: Any) -> Any:
    if isinstance(value, str):
        return "" if len(value) > _LONGEST_TEXT else value
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


def approvals(reader: Reader) -> Approvals:
    """Return how many calls wait for each group, and how long each decision so far took."""
    pending = Counter((ticket.tool, ticket.approvers[-1]) for ticket in tickets.listing(reader))
    decided = stored.resolutions(reader)
    return Approvals(
        pending, [(tool, _resolution(state), float(until - since)) for tool, state, since, until in decided]
    )


def _resolution(state: str) -> str:
    """Return the decision on a ticket, whatever happened to the ticket since."""
    return state.lower() if state in ("DENIED", "AUTO_DENIED") else "approved"
