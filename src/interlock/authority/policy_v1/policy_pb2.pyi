# Written by interlock.doors.grpc.generate from interlock/policy/v1/policy.proto; not by hand.
# ruff: noqa
# fmt: off
# pyright: basic
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_ALLOW: _ClassVar[Decision]
    DECISION_DENY: _ClassVar[Decision]
    DECISION_ASK: _ClassVar[Decision]
    DECISION_PASSTHROUGH: _ClassVar[Decision]
DECISION_UNSPECIFIED: Decision
DECISION_ALLOW: Decision
DECISION_DENY: Decision
DECISION_ASK: Decision
DECISION_PASSTHROUGH: Decision

class AuthorizeRequest(_message.Message):
    __slots__ = ("subject", "action", "resource", "context")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    action: str
    resource: str
    context: Context
    def __init__(self, subject: _Optional[str] = ..., action: _Optional[str] = ..., resource: _Optional[str] = ..., context: _Optional[_Union[Context, _Mapping]] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("required_permissions", "on_behalf_of", "tenant", "scopes", "operation", "session", "door", "native", "mutation_class", "arguments_json", "timestamp")
    REQUIRED_PERMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_OF_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    NATIVE_FIELD_NUMBER: _ClassVar[int]
    MUTATION_CLASS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    required_permissions: _containers.RepeatedScalarFieldContainer[str]
    on_behalf_of: str
    tenant: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    operation: str
    session: str
    door: str
    native: str
    mutation_class: str
    arguments_json: bytes
    timestamp: str
    def __init__(self, required_permissions: _Optional[_Iterable[str]] = ..., on_behalf_of: _Optional[str] = ..., tenant: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., operation: _Optional[str] = ..., session: _Optional[str] = ..., door: _Optional[str] = ..., native: _Optional[str] = ..., mutation_class: _Optional[str] = ..., arguments_json: _Optional[bytes] = ..., timestamp: _Optional[str] = ...) -> None: ...

class AuthorizeResponse(_message.Message):
    __slots__ = ("decision", "reason", "obligations")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OBLIGATIONS_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    reason: str
    obligations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, decision: _Optional[_Union[Decision, str]] = ..., reason: _Optional[str] = ..., obligations: _Optional[_Iterable[str]] = ...) -> None: ...
