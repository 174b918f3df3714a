"""Types of text in a manifest: URIs, dates, hosts, ids, permissions and schemas, each with its check."""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, StringConstraints

from interlock.contract.versions import parse_version
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.schema import Json, compile_validator, require_schema

_URI = compile_validator({"type": "string", "format": "uri"})
_EMAIL = compile_validator({"type": "string", "format": "email"})
_DATE = compile_validator({"type": "string", "format": "date"})
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = expression(rf"(\*\.)?({_LABEL}\.)*{_LABEL}\Z", re.IGNORECASE | re.ASCII)


def _uri(value: str) -> str:
    if not _URI.is_valid(value):
        raise ValueError(f"`{value}` is not a URI")
    return value


def check_email(value: str) -> str:
    if not _EMAIL.is_valid(value):
        raise ValueError(f"`{value}` is not an e-mail address")
    return value


def _date(value: Any) -> Any:
    """Accept a full date only; YAML reads an unquoted one as a date already."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    if isinstance(value, str) and _DATE.is_valid(value):
        return date.fromisoformat(value)
    raise ValueError("a date is written YYYY-MM-DD")


def check_domain(value: str) -> str:
    if len(value) > 253 or not _HOST.match(value):
        raise ValueError(f"`{value}` is not a host name (one leading `*.` is allowed)")
    return value


def check_version(value: str) -> str:
    try:
        parse_version(value)
    except Failure as failure:
        raise ValueError(failure.message) from None
    return value


def _json_schema(value: Json) -> Json:
    try:
        require_schema(value)
    except Failure as failure:
        raise ValueError(failure.message) from None
    return value


Uri = Annotated[str, AfterValidator(_uri)]
Day = Annotated[date, BeforeValidator(_date)]
SchemaDocument = Annotated[dict[str, Any], AfterValidator(_json_schema)]
ToolIdText = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", min_length=3, max_length=255)]
NamespaceText = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", min_length=1, max_length=255)]
Permission = Annotated[str, StringConstraints(pattern=r"^[a-z_]+:[^ ]+$")]
