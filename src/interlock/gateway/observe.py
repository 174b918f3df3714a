"""What others can see of calls while they happen: events, progress, partial results, alerts, counts and spans."""

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
# Of a longer text only the beginning is searched. Far more than is shown, so no credential is cut in two in what is.
_LONGEST_TEXT = 1 << 18
# Characters of a failure in the log when it was logged in full less than a minute ago.
_LONGEST_LINE = 200
_NUMBERS = frozenset((int, float, bool))
_MOST_SHOWN = 1 << 16
# After so many failures in a row, an operator hears that a tool fails.
FAILING_AFTER = 30
# The same failure is logged with its traceback, and the same trouble of the store alerted, once in this time.
TELL_EVERY_S = 60.0
_STORE = frozenset(("E3801", "E3803"))
_LONGEST_SHOWN = 30_000
MOST_PRIVATE = 500
_COUNTS = ("total_steps", "bytes_read", "bytes_written", "line_count")


class Observer:
    """Tells listeners what happens. Costs nothing while nobody listens."""

    def __init__(self, clock: Clock, redactor: Redactor, telemetry: Telemetry) -> None:
        self._clock = clock
        self._redactor = redactor
        self._alerts = telemetry.alerts
        self._count = telemetry.metrics.closed
        self._failures_in_a_row = telemetry.metrics.failures_in_a_row
        self._seldom = Seldom(TELL_EVERY_S, clock.monotonic)
        self.listeners: list[Listener] = []
        # Of one call each, so that whoever follows it takes nothing from the others.
        self.followers: dict[str, list[Listener]] = {}
        self._numbers = itertools.count(1)
        self._sinks: dict[str, SchemaRedactor] = {}
        self.metrics: Counter[str] = telemetry.metrics.signals

    def emit(self, kind: str, call: Call, **data: Any) -> None:
        """Tell of one event."""
        if not self.heard(call):
            return
        event_id = f"{call.id}:{next(self._numbers)}"
        now_ms = self._clock.now_ms()
        self._tell_all(Event(id=event_id, type=kind, invocation_id=call.id, tool=call.ref, at_ms=now_ms, data=data))

    def heard(self, call: Call) -> bool:
        """Whether anybody listens to what happens to a call."""
        return bool(self.listeners) or call.id in self.followers

    def follow(self, call_id: str, listener: Listener) -> Callable[[], None]:
        """Have somebody hear of one call. Returns the way to stop."""
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
        """Tell one listener. What it does with it is its own affair and never the call's."""
        try:
            listener(what)
        except BaseException:  # noqa: BLE001 - a listener is other people's code; even its SystemExit is its own
            _log.exception("a listener failed")

    def alert(self, name: str, call: Call, **facts: Any) -> None:
        """Tell of something an operator should see."""
        self.metrics[name] += 1
        severity = self._alerts.fire(name, tool=call.ref, invocation_id=call.id, trace_id=call.trace_id, facts=facts)
        if isinstance(call.more.span, Recording):
            call.more.span.event("tool.alert", alert=name, severity=severity)
        self.emit("tool.alert", call, alert=name, **facts)

    def closed(
        self, call: Call, metadata: Mapping[str, Any], source: Source = "compute", failure: Failure | None = None
    ) -> None:
        """A call has ended and is on record: count it."""
        self._count(call, metadata, source, failure)
        if failure is not None:
            self._note_failure(call, failure)
        if call.started >= self._alerts.due:
            self._alerts.look()
        if call.more.span is not None and isinstance(call.more.span, Recording):
            call.more.span.cost, call.more.span.source = metadata.get("cost", 0.0), source

    def _note_failure(self, call: Call, failure: Failure) -> None:
        """Alert where a failure is more than one call's trouble: the store cannot be written, or a tool only fails."""
        if failure.code in _STORE:
            if self._seldom.due((failure.code, failure.message)) is not None:
                self.alert("STORE_UNWRITABLE", call, reason=f"{failure.message}; {failure.resolution}")
        elif call.tool is not None and call.launched and call.state != "canceled":
            failures = self._failures_in_a_row(call.tool)
            if failures == FAILING_AFTER:
                reason = f"it failed {failures} times in a row, the last time with {failure.code}"
                self.alert("TOOL_FAILING", call, reason=reason, failures=failures)

    def hide(self, call: Call, text: str) -> str:
        """A text of a call's making without credentials and personal data, above all those it was called with."""
        return self._hider(call)(text)

    def _hider(self, call: Call) -> Callable[[str], str]:
        """The same for several texts. What is private in a call is looked for once."""
        if call.more.lease is not None and call.more.lease.closed:
            return lambda _: REDACTED  # nobody can say any more whether a credential is in it
        hidden, private = self.hidden(call), self._private(call)
        return lambda text: self._hide_text(text, hidden, private)

    def _hide_text(self, text: str, hidden: list[str], private: list[str]) -> str:
        text = scrub(text[:_LONGEST_TEXT], hidden)[0]
        for value in private:
            text = text.replace(value, REDACTED)
        return safe_log(self._redactor, text)

    def hides(self, call: Call) -> bool:
        """Whether a call was given anything that must not get out of it."""
        if call.more.lease is not None or call.more.hidden:
            return True
        return call.tool is not None and (call.tool.sink or self.sink(call)).guarded

    def hidden(self, call: Call) -> list[str]:
        """What must not get out: what the call was lent, what it was handed, and what came under a private name."""
        found = [*call.more.hidden, *(() if call.more.lease is None else call.more.lease.values())]
        if call.tool is not None and self.sink(call).guarded:
            for given in _given(call):
                found.extend(self._private_in(call, given, for_people=True))
        return found

    def check_private(self, call: Call) -> None:
        """Refuse (E3004) a call with very many private values: each is searched for in all that the call says."""
        if len(set(self.hidden(call))) > MOST_PRIVATE:
            raise Failure(
                "E3004",
                f"the call holds more than {MOST_PRIVATE:,} private values",
                details={"mostPrivateValues": MOST_PRIVATE},
                resolution="send fewer passwords, tokens and the like per call",
            )

    def without(self, call: Call, value: Any, keep: Collection[str] = ()) -> Any:
        """Data of a call's making without what must not get out of it; names in `keep` are known anyway."""
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
        """The names of arguments that hold something private, by a mark of the schema or by their name."""
        found = self._redactor.for_schema(contract.input.document).for_people(dict(arguments)).paths
        return sorted({path.split("/")[1] for path in found})

    def remark(self, text: str) -> str:
        """What a person writes about a call, without credentials."""
        return without_credentials(self._redactor, text)

    def sink(self, call: Call) -> SchemaRedactor:
        """What knows which parts of a call's input are private; compiled once for each version."""
        tool = call.tool
        assert tool is not None
        found = tool.sink or self._sinks.get(tool.digest)
        if found is None:
            found = self._sinks[tool.digest] = self._redactor.for_schema(tool.contract.input.document)
        tool.sink = found
        return found

    def clean(self, call: Call, failure: Failure) -> Failure:
        """A failure of other people's making, fit to be shown: no path, no secret, no stack. The log has the rest."""
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
        """Put what a failure was made of, and what was noted beside it, into the log, if that is to hear everything."""
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
        """A failure of our own making that may quote what a call was given or gave."""
        if not self.hides(call):
            return failure
        details = None if failure.details is None else self.without(call, dict(failure.details))
        return Failure(failure.code, self.without(call, failure.message), details=details)

    def shown(self, call: Call, value: Any) -> Any:
        """Data that no output schema describes, without anything private in it."""
        if call.more.lease is not None and call.more.lease.closed:
            return REDACTED
        short, hidden = Shortener().shorten(value), self.hidden(call)
        shown = self._hide_all(self._redactor.value(short).value, hidden, self._private(call))
        return scrub(shown, hidden)[0]

    def resources(self, call: Call, found: Sequence[str]) -> tuple[str, ...] | None:
        """The resources of a call as they may be recorded; None where one holds something private.

        Half of a name would be the name of another resource.
        """
        private = self.hidden(call) if self.hides(call) else []
        if private and any(scrub(one, private)[0] != one for one in found):
            return None
        clean = self._redactor
        return tuple(found) if all(without_credentials(clean, one) == one for one in found) else None

    def shown_input(self, call: Call, arguments: Mapping[str, Any]) -> Json:
        """An input as a reviewer may see it: without what its schema or its name says is private.

        A very long input is cut, and each cut says how much is missing.
        """
        shown = self.sink(call).for_people(dict(arguments)).value
        return cast("Json", self._for_people(list(call.more.hidden), shown))

    def for_reviewer(self, call: Call, preview: Json) -> Json:
        """A preview as a reviewer may see it: names and addresses stay, what the input holds in private does not."""
        return cast("Json", self._for_people(self.hidden(call), preview))

    def _for_people(self, private: list[str], value: Any) -> Any:
        # Known secrets first: cutting could leave half of one, which nobody would recognise.
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
        """Tell of something an operator should see, which no running call of this process is about, if any call is."""
        name = str(data.get("alert", kind))
        self.metrics[name] += 1
        self._alerts.fire(name, tool=tool, invocation_id=invocation_id, facts=data)
        self.mention(kind, invocation_id, tool, **data)

    def surface_changed(self, revision: int) -> None:
        """Tell that the tools that can be listed and called are not the same as before."""
        if self.listeners:
            now_ms, number = self._clock.now_ms(), next(self._numbers)
            kind, data = "tool.surface.updated", {"revision": revision}
            event = Event(id=f"{kind}:{number}", type=kind, invocation_id="", tool="", at_ms=now_ms, data=data,
                          surface="tools")  # fmt: skip
            self._tell_all(event)

    def mention(self, kind: str, invocation_id: str, tool: str, **data: Any) -> None:
        """Tell of something that happened to a call which no task of this process is running."""
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

    def log_failure(self, call: Call, what: str, error: BaseException) -> None:
        """Put an unforeseen failure into the log, in full but for what is private.

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
            return  # nobody hears it
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
    """A progress record with every field of `tool_progress`; a value of the wrong type becomes null or an empty list.

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
    """The name of a part of a result: in its event and in progress records."""
    return f"{call.id}:part:{index}"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _texts(value: Any) -> list[str]:
    found = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return [one for one in found if isinstance(one, str)]


def _shortener() -> Shortener:
    """Cuts what a person is shown. No text is left so long that the search for credentials would cut it once more."""
    return Shortener(characters=_MOST_SHOWN, longest=_LONGEST_SHOWN)


def _traced(error: BaseException) -> str:
    """An error with its stack. The words of one with a very long text are cut first: formatting walks each line."""
    words = str(error)
    if len(words) <= _LONGEST_REASONS:
        return "".join(traceback.format_exception(error))
    stack = "".join(traceback.format_tb(error.__traceback__))
    return f"{stack}{type(error).__name__}: {words[:_LONGEST_REASONS]}… [{len(words):,} characters]"


def _writable(text: str) -> str:
    """A text for the log. A lone surrogate is escaped: no handler could encode it, and the line would be lost."""
    return text.encode(errors="backslashreplace").decode()


def _with_count(what: str, held_back: int) -> str:
    return f"{what} ({held_back} more since it was last told in full)" if held_back else what


def _place(error: BaseException) -> tuple[str, int]:
    """Where an error was raised: the file and the line."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def _short(value: Any) -> Any:
    """Data without its longest texts: no text that is searched for private values is long enough to hold them."""
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
    """What a call was called with: as it was sent and, where checking has changed it, as it is used."""
    sent = call.request.arguments
    return (sent,) if call.input is sent else (sent, call.input)


def approvals(reader: Reader) -> Approvals:
    """How many calls wait for which group, and how long each decision that was ever made took."""
    pending = Counter((ticket.tool, ticket.approvers[-1]) for ticket in tickets.listing(reader))
    decided = stored.resolutions(reader)
    return Approvals(
        pending, [(tool, _resolution(state), float(until - since)) for tool, state, since, until in decided]
    )


def _resolution(state: str) -> str:
    """What was decided, whatever has become of it since."""
    return state.lower() if state in ("DENIED", "AUTO_DENIED") else "approved"
