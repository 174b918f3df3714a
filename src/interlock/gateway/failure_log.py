"""The log of failures, and failures of tools as their callers may see them.

The log has what the caller is not shown. The same failure is logged in full once a minute and in one line otherwise, so
that a tool that fails thousands of times does not fill the log.
"""

from __future__ import annotations

import logging
import traceback

from interlock.call.phases import Call
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.seldom import Seldom
from interlock.gateway.redaction import LONGEST_TEXT, CallRedaction
from interlock.privacy.redact import REDACTED, Redactor, safe_message

_log = logging.getLogger("interlock.gateway")
_LONGEST_REASONS = 8000
# Characters of a failure in the log when it was logged in full less than a minute ago.
_LONGEST_LINE = 200
# The same failure is logged with its traceback once in this time.
LOG_EVERY_S = 60.0


class FailureLog:
    """Logs failures without private values."""

    def __init__(self, clock: Clock, redactor: Redactor, redaction: CallRedaction) -> None:
        self._redactor = redactor
        self._redaction = redaction
        self._seldom = Seldom(LOG_EVERY_S, clock.monotonic)

    def log(self, call: Call, what: str, error: BaseException) -> None:
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
            trace = self._redaction.redact_text(call, _traced(error))
        except Exception:  # noqa: BLE001 - what cannot be looked through is not logged; that it failed is
            trace = f"{type(error).__name__}; the rest could not be searched for private data"
        _log.error("%s in call %s\n%s", what, call.id, _writable(trace), extra=extra)

    def redact_and_log(self, call: Call, failure: Failure) -> Failure:
        """Return a failure of a tool without paths, secrets and stack. The log has the rest."""
        hide = self._redaction.text_redactor(call)
        message = safe_message(self._redactor, hide(failure.message))
        details = None if failure.details is None else self._redaction.redact_data(call, dict(failure.details))
        if isinstance(failure.__cause__, Exception) and not isinstance(failure.__cause__, Failure):
            self.log(call, f"{call.ref} failed", failure.__cause__)
        elif message != failure.in_full or details != failure.details_in_full:
            # A failure of one kind is searched and logged in full once a minute. Otherwise the log has the beginning of
            # what the caller is shown.
            what, text = f"{call.ref} failed", message[:_LONGEST_LINE]
            if (held_back := self._seldom.due((call.ref, failure.code))) is not None:
                text = hide(f"{failure.in_full[:LONGEST_TEXT]} {dict(failure.details_in_full or {}) or ''}")
                what = _with_count(what, held_back)
            extra = {"trace_id": call.trace_id, "invocation_id": call.id}
            _log.warning("%s in call %s: %s", what, call.id, _writable(text), extra=extra)
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
            text = self._redaction.redact_text(call, "\n".join(reason.rstrip() for reason in reasons))
            text = text[-_LONGEST_REASONS:]
            _log.debug("behind the failure of %s in call %s\n%s", call.ref, call.id, _writable(text), extra=extra)


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
