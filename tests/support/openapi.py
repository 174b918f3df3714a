"""OpenAPI documents for tests."""

from __future__ import annotations

from typing import Any

from interlock.data.schema import Json


def document(paths: Json, version: str = "3.1.0", **parts: Any) -> Json:
    return {"openapi": version, "info": {"title": "t", "version": "1"}, "paths": paths, **parts}
