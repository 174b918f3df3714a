"""A registered version of a tool: its row, its contract, and the function behind it.

The models of contracts are loaded when a version is used. A version is found and shown without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import tools

if TYPE_CHECKING:
    from interlock.call.prepared import Prepared
    from interlock.contract.contract import Contract
    from interlock.contract.declare import Tool
    from interlock.contract.manifest import LifecycleState

_LARGE = 16_384  # characters of a manifest, or of the text of a tool, that take some milliseconds to compile


@dataclass(frozen=True)
class Row:
    """A version as stored."""

    address: str
    version: str
    digest: str
    state: LifecycleState
    manifest: str
    origin: str
    published_ms: int
    notice: tools.Notice | None


class Content:
    """A manifest and what was compiled from it, by digest. It never changes, so it is read once.

    INVARIANT: a change to the registry re-reads what changed and nothing else.
    """

    def __init__(self, manifest: str, digest: str) -> None:
        self.manifest = manifest
        self._digest = digest

    @property
    def document(self) -> dict[str, Any]:
        """The manifest as the author published it, without defaults."""
        return orjson.loads(self.manifest)

    @cached_property
    def contract(self) -> Contract:
        from interlock.contract.contract import admitted_contract

        return admitted_contract(self.manifest, self._digest)

    @cached_property
    def required_scopes(self) -> tuple[str, ...]:
        """The scopes that callers need, without compiling the contract: of many tools, few are ever called."""
        return tuple(self.document.get("required_scopes") or ())

    @cached_property
    def required_permissions(self) -> tuple[str, ...]:
        """The permissions that calls need, in the same way."""
        return tuple(self.document.get("required_permissions") or ())

    @cached_property
    def stated(self) -> Mapping[str, Any]:
        """Attributes for rules, as far as they are known without compiling the contract."""
        document = self.document
        # A compensation class implies the mutation class.
        return _NOTHING if "compensation_class" in document else _stated(document.get("mutation_class"))


_NOTHING: Mapping[str, Any] = {}


@cache
def _stated(mutation_class: str | None) -> Mapping[str, Any]:
    """One object for all tools of a class."""
    return {"mutation_class": mutation_class}


class Version:
    """A registered version, compiled: its contract, its state, and the function behind it."""

    def __init__(self, row: Row, bind: Callable[[Row], Tool[..., Any]], content: Content, text_size: int = 0) -> None:
        """Make a version. `text_size` is the length of the text that its function is made of, if it is in the store."""
        self.row = row
        self.content = content
        self._bind = bind
        self._has_large_text = text_size >= _LARGE
        self._bound: Tool[..., Any] | None = None
        self._prepared: Prepared | None = None
        self._compiled = False

    @property
    def contract(self) -> Contract:
        return self.content.contract

    @property
    def bound(self) -> Tool[..., Any]:
        if self._bound is None:
            self._bound = self._bind(self.row)
        return self._bound

    @property
    def prepared(self) -> Prepared:
        """The version ready to be called, bound to its function; Stranded if its code is unavailable."""
        if self._prepared is None:
            try:
                bound = self.bound
            except Failure as failure:
                raise Stranded(self, failure) from failure
            self._prepared = self._with(bound)
        return self._prepared

    @property
    def at_hand(self) -> bool:
        """Whether `prepared` returns at once. Otherwise a large contract or text has to be compiled first: see
        `compile`.
        """
        small = len(self.content.manifest) < _LARGE and not self._has_large_text
        return small or self._compiled or self._prepared is not None

    def compile(self) -> None:
        """Compile the contract, on a thread apart from the event loop.

        The code behind it is bound on the loop, unless nothing is imported for it.
        """
        if self._has_large_text or self.row.origin.startswith(("upstream:", "library:")):
            with contextlib.suppress(Failure):  # raised again when the version is asked for
                _ = self.prepared
        else:
            _ = self.contract.input.fits
        self._compiled = True

    def unbind(self) -> None:
        """Bind the version anew with its next use: another function serves it."""
        self._bound = self._prepared = None

    def _with(self, bound: Tool[..., Any]) -> Prepared:
        from interlock.call.prepared import Prepared

        notice = self.row.notice
        return Prepared(self.contract, bound, self.row.digest, None if notice is None else notice.document())

    def gone(self, now_ms: int) -> bool:
        """Whether the removal date has passed."""
        notice = self.row.notice
        return self.row.state in ("sunset", "removed") or (notice is not None and now_ms >= notice.removal_ms)

    def refuse_if_gone(self, now_ms: int) -> None:
        """Refuse a version whose removal date has passed (E3104)."""
        notice = self.row.notice
        if self.gone(now_ms):
            successor = f"; use {notice.successor}" if notice and notice.successor else ""
            details = None if notice is None else {"deprecation": notice.document()}
            raise Failure("E3104", f"{self.row.address}@{self.row.version} was removed{successor}", details=details)


class Stranded(Failure):
    """A registered version whose code is missing, broken or different from what was admitted: the operator must act
    (E3108).

    `prepared` has everything of the version except the code: enough to answer from stored results.
    """

    def __init__(self, version: Version, why: Failure) -> None:
        row = version.row
        reason = (why.details or {}).get("where") or why.message  # not the message of the code that failed
        words = "bring back the code that was admitted, or publish another version: interlock tools add"
        words = (why.details or {}).get("install") or words
        super().__init__("E3108", f"{row.address}@{row.version} cannot run here: {reason}", resolution=words)
        self._version = version

    @property
    def prepared(self) -> Prepared:
        from interlock.contract.manifest_tools import from_nowhere

        return self._version._with(from_nowhere(self._version.contract.manifest, self))  # pyright: ignore[reportPrivateUsage] - two halves of one thing
