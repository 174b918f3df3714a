"""The error type and the table of error codes.

Every failure that leaves Interlock carries an E-code. The table below relates each code to its `errorCode`, its
`error_class`, whether sending the same call again can help, and its status over HTTP, JSON-RPC and gRPC. Documentation,
endpoints and tests read this table; nothing else in the program decides a status.

Messages are written for a model and its developer: lower case, no full stop, user input in backticks, and never a stack
trace, a path or a secret.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from interlock.core.credentials import without_credentials, without_credentials_in
from interlock.core.host_paths import without_paths, without_paths_in
from interlock.core.record import dataclass

_log = logging.getLogger("interlock.errors")


class ErrorCode(StrEnum):
    """The kind of a failure, by what a caller has to do about it."""

    INVALID_INPUT = "INVALID_INPUT"
    AUTHORIZATION_DENIED = "AUTHORIZATION_DENIED"
    TOOL_NOT_FOUND = "TOOL_NOT_FOUND"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    RATE_LIMITED = "RATE_LIMITED"
    UPSTREAM_FAILURE = "UPSTREAM_FAILURE"
    INTERNAL_TOOL_ERROR = "INTERNAL_TOOL_ERROR"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    PRECONDITION_FAILED = "PRECONDITION_FAILED"
    CONFLICT = "CONFLICT"
    APPROVAL_REQUIRED = "APPROVAL_REQUIRED"
    EXECUTION_FAILED = "EXECUTION_FAILED"
    COMPOSITE_PARTIAL_FAILURE = "COMPOSITE_PARTIAL_FAILURE"
    RETRY_EXHAUSTED = "RETRY_EXHAUSTED"


class ErrorClass(StrEnum):
    """The stage at which a call failed, in the words of the Agent Tool standard."""

    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    SCHEMA_VALIDATION_FAILED = "schema_validation_failed"
    SCHEMA_NOT_LOADED = "schema_not_loaded"
    PERMISSION_DENIED = "permission_denied"
    APPROVAL_REJECTED = "approval_rejected"
    POLICY_BLOCKED = "policy_blocked"
    HOOK_BLOCKED = "hook_blocked"
    CAPABILITY_GAP = "capability_gap"
    SETUP_REQUIRED = "setup_required"
    CREDENTIAL_MISSING = "credential_missing"
    SANDBOX_VIOLATION = "sandbox_violation"
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    DEPENDENCY_UNAVAILABLE = "dependency_unavailable"
    EXECUTION_FAILED = "execution_failed"
    PARTIAL_FAILURE = "partial_failure"
    RESULT_TOO_LARGE = "result_too_large"
    RESULT_REDACTED = "result_redacted"
    SIBLING_CANCELED = "sibling_canceled"
    STREAMING_FALLBACK_DISCARDED = "streaming_fallback_discarded"
    CANCELED = "canceled"


# Whether the same call may be sent again. `None`: the failure itself states it, because only a tool knows whether its
# failure was transient; a failure that does not state it is not retryable.
RETRYABLE: Mapping[ErrorCode, bool | None] = {
    ErrorCode.INVALID_INPUT: False,
    ErrorCode.AUTHORIZATION_DENIED: False,
    ErrorCode.TOOL_NOT_FOUND: False,
    ErrorCode.DEADLINE_EXCEEDED: True,
    ErrorCode.RATE_LIMITED: True,
    ErrorCode.UPSTREAM_FAILURE: True,
    ErrorCode.INTERNAL_TOOL_ERROR: None,
    ErrorCode.RESOURCE_EXHAUSTED: False,
    ErrorCode.PRECONDITION_FAILED: False,
    ErrorCode.CONFLICT: True,
    ErrorCode.APPROVAL_REQUIRED: True,
    ErrorCode.EXECUTION_FAILED: None,
    ErrorCode.COMPOSITE_PARTIAL_FAILURE: False,
    ErrorCode.RETRY_EXHAUSTED: False,
}

_JSONRPC: Mapping[ErrorCode, int] = {
    ErrorCode.INVALID_INPUT: -32602,
    ErrorCode.AUTHORIZATION_DENIED: -32001,
    ErrorCode.TOOL_NOT_FOUND: -32004,
    ErrorCode.DEADLINE_EXCEEDED: -32008,
    ErrorCode.RATE_LIMITED: -32029,
    ErrorCode.UPSTREAM_FAILURE: -32010,
    ErrorCode.INTERNAL_TOOL_ERROR: -32603,
    ErrorCode.RESOURCE_EXHAUSTED: -32011,
    ErrorCode.PRECONDITION_FAILED: -32012,
    ErrorCode.CONFLICT: -32009,
    ErrorCode.APPROVAL_REQUIRED: -32002,
    ErrorCode.EXECUTION_FAILED: -32013,
    ErrorCode.COMPOSITE_PARTIAL_FAILURE: -32014,
    ErrorCode.RETRY_EXHAUSTED: -32015,
}

_GRPC: Mapping[ErrorCode, str] = {
    ErrorCode.INVALID_INPUT: "INVALID_ARGUMENT",
    ErrorCode.AUTHORIZATION_DENIED: "PERMISSION_DENIED",
    ErrorCode.TOOL_NOT_FOUND: "NOT_FOUND",
    ErrorCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    ErrorCode.RATE_LIMITED: "RESOURCE_EXHAUSTED",
    ErrorCode.UPSTREAM_FAILURE: "UNAVAILABLE",
    ErrorCode.INTERNAL_TOOL_ERROR: "INTERNAL",
    ErrorCode.RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    ErrorCode.PRECONDITION_FAILED: "FAILED_PRECONDITION",
    ErrorCode.CONFLICT: "ABORTED",
    ErrorCode.APPROVAL_REQUIRED: "FAILED_PRECONDITION",
    ErrorCode.EXECUTION_FAILED: "INTERNAL",
    ErrorCode.COMPOSITE_PARTIAL_FAILURE: "INTERNAL",
    ErrorCode.RETRY_EXHAUSTED: "UNAVAILABLE",
}

# A few HTTP statuses are more specific than the errorCode; gRPC has statuses for them too.
_GRPC_BY_HTTP: Mapping[int, str] = {401: "UNAUTHENTICATED", 413: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 200: "OK"}


@dataclass(frozen=True, slots=True)
class Code:
    """One row of the table."""

    code: str
    title: str
    http: int
    error_code: ErrorCode
    error_class: ErrorClass
    resolution: str

    @property
    def retryable(self) -> bool | None:
        return False if self.code in _NEVER_AGAIN else RETRYABLE[self.error_code]

    @property
    def jsonrpc(self) -> int:
        return _JSONRPC[self.error_code]

    @property
    def grpc(self) -> str:
        return _GRPC_BY_HTTP.get(self.http, _GRPC[self.error_code])


_E, _C = ErrorCode, ErrorClass

# Codes for which the same call sent again meets the same failure, whatever their errorCode says: a tool that broke its
# contract breaks it again (E3303), and an idempotency key stays with the arguments it was first used with (E3306).
_NEVER_AGAIN: Final = frozenset({"E3303", "E3306"})

# fmt: off
_TABLE: tuple[tuple[str, str, int, ErrorCode, ErrorClass, str], ...] = (
    # general
    ("E3000", "internal error", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "report the trace id to the operator"),
    ("E3001", "service unavailable", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait, then send the call again"),
    ("E3002", "request timed out", 504, _E.DEADLINE_EXCEEDED, _C.TIMEOUT, "allow more time or ask for less"),
    ("E3003", "rate limit reached", 429, _E.RATE_LIMITED, _C.RATE_LIMITED, "wait for retryAfterMs, then send the call again"),
    ("E3004", "malformed request", 400, _E.INVALID_INPUT, _C.INVALID_ARGUMENTS, "send a request of the documented form"),
    # registry
    ("E3101", "tool not found", 404, _E.TOOL_NOT_FOUND, _C.UNKNOWN_TOOL, "list the tools and use one of their names"),
    ("E3102", "version not found", 404, _E.TOOL_NOT_FOUND, _C.UNKNOWN_TOOL, "ask for a version or range that is registered"),
    ("E3103", "version conflict", 409, _E.CONFLICT, _C.CAPABILITY_GAP, "publish under a new version or widen the range"),
    ("E3104", "version is past its removal date", 410, _E.TOOL_NOT_FOUND, _C.UNKNOWN_TOOL, "use the named successor"),
    ("E3105", "manifest refused", 422, _E.INVALID_INPUT, _C.SCHEMA_VALIDATION_FAILED, "correct every listed fault and register again"),
    ("E3106", "semantic search failed", 500, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "search by keyword; check the embedder"),
    ("E3107", "tool schema not loaded", 412, _E.PRECONDITION_FAILED, _C.SCHEMA_NOT_LOADED, "discover the tool first, then call it"),
    ("E3108", "setup needed", 412, _E.PRECONDITION_FAILED, _C.SETUP_REQUIRED, "finish the named setup step"),
    ("E3109", "operation not offered", 412, _E.PRECONDITION_FAILED, _C.CAPABILITY_GAP, "use an operation that the tool's profile states"),
    # permission
    ("E3200", "denied", 403, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "ask the operator for the permission"),
    ("E3201", "token expired", 401, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "obtain a new token"),
    ("E3202", "token signature is wrong", 401, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "use a token signed by a known key"),
    ("E3203", "token malformed", 401, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "send a well-formed token"),
    ("E3204", "tool not in token", 403, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "ask for a token that names the tool"),
    ("E3205", "policy engine failed", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "an operator corrects the policy; then send the call again"),
    ("E3206", "permission denied", 403, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "ask for the missing permission"),
    ("E3207", "identity not found", 404, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "register the identity first"),
    ("E3208", "approval required", 202, _E.APPROVAL_REQUIRED, _C.POLICY_BLOCKED, "wait until a person has decided, then ask again"),
    ("E3209", "approval rejected", 403, _E.AUTHORIZATION_DENIED, _C.APPROVAL_REJECTED, "do not repeat the call; ask the reviewer"),
    ("E3210", "blocked by policy", 403, _E.AUTHORIZATION_DENIED, _C.POLICY_BLOCKED, "an operator must lift the block"),
    ("E3211", "stopped by a hook", 403, _E.AUTHORIZATION_DENIED, _C.HOOK_BLOCKED, "read the hook's reason and change the call"),
    ("E3212", "caller not identified", 401, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "send the caller's identity with the call"),
    # validation
    ("E3301", "input does not fit the schema", 400, _E.INVALID_INPUT, _C.SCHEMA_VALIDATION_FAILED, "correct every listed argument"),
    ("E3302", "input cannot be converted", 400, _E.INVALID_INPUT, _C.SCHEMA_VALIDATION_FAILED, "send the value in the schema's type"),
    ("E3303", "result does not fit the schema", 500, _E.INTERNAL_TOOL_ERROR, _C.SCHEMA_VALIDATION_FAILED, "tell the tool's owner"),
    ("E3304", "redaction failed", 500, _E.INTERNAL_TOOL_ERROR, _C.RESULT_REDACTED, "tell the operator; the content is withheld"),
    ("E3305", "injection detected", 400, _E.INVALID_INPUT, _C.INVALID_ARGUMENTS, "send the value as plain data"),
    ("E3306", "idempotency key used with other arguments", 409, _E.CONFLICT, _C.INVALID_ARGUMENTS, "use a new idempotency key for a new action"),
    ("E3307", "idempotency key missing or malformed", 400, _E.INVALID_INPUT, _C.INVALID_ARGUMENTS, "send an idempotency key of your own with the call"),
    ("E3308", "input refused by the tool's own check", 400, _E.INVALID_INPUT, _C.INVALID_ARGUMENTS, "correct every listed argument"),
    ("E3309", "request too large", 413, _E.INVALID_INPUT, _C.INVALID_ARGUMENTS, "send less in one request"),
    # execution
    ("E3401", "tool failed", 500, _E.EXECUTION_FAILED, _C.EXECUTION_FAILED, "tell the tool's owner, unless it is retryable: then send the call again"),
    ("E3402", "tool timed out", 504, _E.DEADLINE_EXCEEDED, _C.TIMEOUT, "allow more time or ask for less"),
    ("E3403", "tool ran out of memory", 500, _E.RESOURCE_EXHAUSTED, _C.EXECUTION_FAILED, "ask for less or raise the memory limit"),
    ("E3404", "tool crashed", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "tell the tool's owner"),
    ("E3405", "isolation could not be set up", 500, _E.INTERNAL_TOOL_ERROR, _C.SANDBOX_VIOLATION, "run interlock doctor on the host"),
    ("E3406", "network policy violated", 403, _E.AUTHORIZATION_DENIED, _C.SANDBOX_VIOLATION, "ask for the host to be allowed"),
    ("E3407", "resource limit reached", 429, _E.RESOURCE_EXHAUSTED, _C.EXECUTION_FAILED, "ask for less or raise the limit"),
    ("E3408", "same call still running", 409, _E.CONFLICT, _C.DEPENDENCY_UNAVAILABLE, "ask again after retryAfterMs with the same idempotency key"),
    ("E3409", "outcome unknown", 409, _E.PRECONDITION_FAILED, _C.EXECUTION_FAILED, "settle it with interlock calls reconcile"),
    ("E3410", "state changed meanwhile", 409, _E.CONFLICT, _C.EXECUTION_FAILED, "read the state again, then send the call again"),
    ("E3411", "precondition not met", 412, _E.PRECONDITION_FAILED, _C.EXECUTION_FAILED, "bring about the named state first"),
    ("E3412", "cancelled with a sibling", 499, _E.EXECUTION_FAILED, _C.SIBLING_CANCELED, "send the call again without the failing sibling"),
    ("E3413", "streamed result discarded", 499, _E.EXECUTION_FAILED, _C.STREAMING_FALLBACK_DISCARDED, "use the result that replaced it"),
    ("E3414", "some parts failed", 500, _E.COMPOSITE_PARTIAL_FAILURE, _C.PARTIAL_FAILURE, "see details for what was done and undone"),
    ("E3415", "retries used up", 503, _E.RETRY_EXHAUSTED, _C.DEPENDENCY_UNAVAILABLE, "see the wrapped error; try much later"),
    ("E3416", "result too large", 500, _E.RESOURCE_EXHAUSTED, _C.RESULT_TOO_LARGE, "ask for less, or page through it"),
    ("E3417", "effect does not match the result", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "tell the tool's owner; see details"),
    # upstream
    ("E3501", "circuit breaker open", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait for retryAfterMs, then send the call again"),
    ("E3502", "upstream unavailable", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait, then send the call again"),
    ("E3503", "upstream timed out", 504, _E.UPSTREAM_FAILURE, _C.TIMEOUT, "wait, then send the call again"),
    ("E3504", "upstream rate limit", 429, _E.RATE_LIMITED, _C.RATE_LIMITED, "wait for retryAfterMs, then send the call again"),
    # secrets
    ("E3601", "vault unavailable", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait, then send the call again"),
    ("E3602", "credential not found", 404, _E.PRECONDITION_FAILED, _C.CREDENTIAL_MISSING, "store the credential first"),
    ("E3603", "credential expired", 401, _E.AUTHORIZATION_DENIED, _C.CREDENTIAL_MISSING, "renew the credential"),
    ("E3604", "credential cannot be decrypted", 500, _E.INTERNAL_TOOL_ERROR, _C.CREDENTIAL_MISSING, "check the store's key"),
    # calls and jobs
    ("E3701", "job queue full", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait, then submit again"),
    ("E3702", "no such call, ticket or payload", 404, _E.TOOL_NOT_FOUND, _C.UNKNOWN_TOOL, "check the id"),
    ("E3703", "cancelled", 499, _E.EXECUTION_FAILED, _C.CANCELED, "send the call again if it is still wanted"),
    ("E3704", "webhook not delivered", 500, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "poll for the result; check the receiver"),
    # journal and events
    ("E3801", "journal unavailable", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "make the journal writable, then send the call again"),
    ("E3802", "event cannot be serialized", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "report the trace id to the operator"),
    ("E3803", "journal backpressure", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "slow down, then send the call again"),
    ("E3804", "data directory cannot be used", 503, _E.PRECONDITION_FAILED, _C.SETUP_REQUIRED, "choose another data directory or restore this one from a backup"),
    ("E3805", "store is newer than this program", 500, _E.PRECONDITION_FAILED, _C.SETUP_REQUIRED, "run the newer Interlock that made it"),
    # document bridge
    ("E3851", "document server unavailable", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait, then send the call again"),
    ("E3852", "document not found", 404, _E.PRECONDITION_FAILED, _C.INVALID_ARGUMENTS, "check the document id"),
    ("E3853", "document query timed out", 504, _E.UPSTREAM_FAILURE, _C.TIMEOUT, "ask a simpler question"),
    ("E3854", "document cache miss", 200, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "nothing to do: a diagnostic only"),
    ("E3855", "document permission denied", 403, _E.AUTHORIZATION_DENIED, _C.PERMISSION_DENIED, "ask for access to the document"),
    ("E3856", "document server protocol error", 500, _E.UPSTREAM_FAILURE, _C.EXECUTION_FAILED, "check the document server"),
    # state bridge
    ("E3901", "state server unavailable", 503, _E.UPSTREAM_FAILURE, _C.DEPENDENCY_UNAVAILABLE, "wait, then send the call again"),
    ("E3902", "checkpoint not written", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "check the store"),
    ("E3903", "checkpoint not found", 404, _E.PRECONDITION_FAILED, _C.INVALID_ARGUMENTS, "check the checkpoint id"),
    ("E3904", "checkpoint corrupted", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "resume from an older checkpoint"),
    ("E3905", "resume failed", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "start the work from the beginning"),
    ("E3906", "state cannot be serialized", 500, _E.INTERNAL_TOOL_ERROR, _C.EXECUTION_FAILED, "keep JSON values only in the state"),
    ("E3907", "state server protocol error", 500, _E.UPSTREAM_FAILURE, _C.EXECUTION_FAILED, "check the state server"),
)
# fmt: on

CODES: Mapping[str, Code] = {row[0]: Code(*row) for row in _TABLE}

# The E-code for a tool that raises an errorCode without an E-code.
_DEFAULT_CODE: Mapping[ErrorCode, str] = {
    _E.INVALID_INPUT: "E3308",
    _E.AUTHORIZATION_DENIED: "E3206",
    _E.TOOL_NOT_FOUND: "E3101",
    _E.DEADLINE_EXCEEDED: "E3402",
    _E.RATE_LIMITED: "E3504",
    _E.UPSTREAM_FAILURE: "E3502",
    _E.INTERNAL_TOOL_ERROR: "E3404",
    _E.RESOURCE_EXHAUSTED: "E3407",
    _E.PRECONDITION_FAILED: "E3411",
    _E.CONFLICT: "E3410",
    _E.APPROVAL_REQUIRED: "E3208",
    _E.EXECUTION_FAILED: "E3401",
    _E.COMPOSITE_PARTIAL_FAILURE: "E3414",
    _E.RETRY_EXHAUSTED: "E3415",
}


# The beginning of a text that a failure keeps: twice what any reader of it shows. A search through a text of megabytes
# would hold up every other call.
_LONGEST_TEXT: Final = 1 << 16


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… [{len(text) - _LONGEST_TEXT:,} more characters are not shown]"


class Failure(Exception):  # noqa: N818 - a failure is a result here, not an error of the program
    """A call that did not succeed, with everything that its caller may know about it.

    Tools raise it to state what kind of failure they met: `Failure("UPSTREAM_FAILURE", "the bank does not answer")`.
    """

    def __init__(
        self,
        code: str | ErrorCode,
        message: str | None = None,
        *,
        details: Mapping[str, Any] | None = None,
        retryable: bool | None = None,
        retry_after_ms: int | None = None,
        native_error_ref: str | None = None,
        policy_refs: tuple[str, ...] = (),
        evidence_refs: tuple[str, ...] = (),
        resolution: str | None = None,
        unsettled: bool = False,
    ) -> None:
        row = CODES.get(code) or CODES[_DEFAULT_CODE[ErrorCode(code)]]
        # INVARIANT: no failure contains a credential, and nothing that leaves an endpoint contains a path of this machine
        # or a stack trace. `in_full` is for the log.
        message = None if not message else without_credentials(_cut(message))
        details = None if details is None else without_credentials_in(details)
        super().__init__(message or row.title)
        self.row = row
        self.message = row.title if not message else without_paths(message) or row.title
        self.details: Mapping[str, Any] | None = None if details is None else without_paths_in(details)
        self._details = details
        # INVARIANT: where the table decides whether a failure is retryable, nothing overrides it; where it does not,
        # the default is no. A failure whose effect is unknown is never retryable: no caller is advised to repeat what may
        # have been done.
        self.unsettled = unsettled
        self.retryable = not unsettled and (bool(retryable) if row.retryable is None else row.retryable)
        self.retry_after_ms = retry_after_ms
        self.native_error_ref = None if native_error_ref is None else without_credentials(_cut(native_error_ref))
        self.policy_refs = policy_refs
        self.evidence_refs = evidence_refs
        self.resolution = without_credentials(_cut(resolution)) if resolution else row.resolution

    @property
    def code(self) -> str:
        return self.row.code

    @property
    def in_full(self) -> str:
        """The message including paths: for logs, and for people at the command line of this machine."""
        return str(self)

    @property
    def details_in_full(self) -> Mapping[str, Any] | None:
        """The details including paths, for logs."""
        return self._details

    def __repr__(self) -> str:
        return f"Failure({self.row.code}, {self.message!r})"

    def saying(self, message: str, details: Mapping[str, Any] | None) -> Failure:
        """Copy the failure with another message."""
        return Failure(
            self.code,
            message,
            details=details,
            retryable=self.retryable,
            retry_after_ms=self.retry_after_ms,
            native_error_ref=self.native_error_ref,
            policy_refs=self.policy_refs,
            evidence_refs=self.evidence_refs,
            resolution=self.resolution,
            unsettled=self.unsettled,
        )

    def envelope(self, trace_id: str) -> dict[str, Any]:
        """The JSON form in which every endpoint returns a failure."""
        row = self.row
        if self.message != self.in_full or self.details is not self._details:
            _log.warning("%s: %s %s", row.code, self.in_full, self._details or "", extra={"trace_id": trace_id})
        envelope: dict[str, Any] = {
            "schema_version": "0.2.0",
            "errorCode": row.error_code.value,
            "error_code": row.code,
            "error_class": row.error_class.value,
            "retryable": self.retryable,
            "recoverability": "retry" if self.retryable else "none",
            "humanMessage": self.message,
            "message": self.message,
            "resolution": without_paths(self.resolution),
            "traceId": trace_id,
            "native_error_ref": None if self.native_error_ref is None else without_paths(self.native_error_ref),
            "policy_refs": list(self.policy_refs),
            "evidence_refs": list(self.evidence_refs),
        }
        if self.retry_after_ms is not None:
            envelope["retryAfterMs"] = self.retry_after_ms
            envelope["retry_after"] = self.retry_after_ms
        if self.details is not None:
            envelope["details"] = dict(self.details)
        return envelope
