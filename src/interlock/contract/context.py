"""The base of the context of a call. The reader of type hints knows it, and the package `call` above builds on it."""

from __future__ import annotations


class CallContext:
    """Base of the context that a tool may take as an argument. The type hint of that argument names a subclass."""
