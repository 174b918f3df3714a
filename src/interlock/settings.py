"""What an operator can set, in `settings.toml` of the home or by INTERLOCK_* variables."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

import pydantic

from interlock.core.errors import Failure


class Settings(pydantic.BaseModel):
    """Every setting with its default. Unknown names are refused: a misspelt safety setting must not be ignored."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    audit: Literal["durable", "batched"] = pydantic.Field(
        "durable",
        description="durable: every record is on disk before the reply. batched: reads reply at once and their records"
        " follow with the next batch; writes stay durable.",
    )
    min_window_s: int = pydantic.Field(3600, ge=1, description="the shortest time an idempotency record lives")
    payload_days: int = pydantic.Field(7, ge=1, description="how long large results are kept")
    undo_days: int = pydantic.Field(90, ge=1, description="how long the means to undo a call are kept")
    retention_years: int = pydantic.Field(1, ge=1, le=7, description="how long records of reads are kept at least")
    retention_years_writes: int = pydantic.Field(7, ge=1, le=7, description="the same for writes and all other records")
    strict_redaction: bool = pydantic.Field(False, description="redact whatever merely looks like a number or address")
    redact_names: tuple[str, ...] = pydantic.Field((), description="further field names whose values are never shown")
    no_pattern_redaction: tuple[str, ...] = pydantic.Field((), description="namespaces whose results keep their text")

    housekeeping: bool = pydantic.Field(
        True, description="let go of expired keys and payloads and retire versions in the background, once an hour"
    )

    def redacts(self, namespace: str) -> bool:
        return namespace not in self.no_pattern_redaction


def load_settings(path: Path, **given: Any) -> Settings:
    """Settings from the file, overridden by the environment, overridden by what the program was given."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text()) if path.exists() else {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Failure("E3004", f"settings.toml cannot be read: {str(error).splitlines()[0]}") from None
    for name in Settings.model_fields:
        from_environment = os.environ.get(f"INTERLOCK_{name.upper()}")
        if from_environment is not None:
            listed = isinstance(Settings.model_fields[name].default, tuple)
            values[name] = [part for part in from_environment.split(",") if part] if listed else from_environment
    try:
        return Settings.model_validate({**values, **given})
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Failure("E3004", f"the setting `{where}` cannot be used: {first['msg'].lower()}") from None
