"""Check that the token of a caller is valid and covers a call: its tool, version and resources.

Which tools a token covers does not depend on the input, so it is remembered. The resources of a call are recorded, so
that tokens that are delegated from this one see the call only where they cover them.
"""

from __future__ import annotations

from interlock.authority.facts import as_written, changes_of, names_of, resources_of
from interlock.authority.verifier import Verifier
from interlock.call.capability import Capability
from interlock.call.phases import Call, Checked, Decision
from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.gateway import token_checks
from interlock.gateway.redaction import CallRedaction

_MOST_COVERED = 50_000
# The largest input, and the largest number of resources, for which the resources of a call are recorded.
_LARGEST_NAMED = 16_384
_MOST_NAMED = 100
_LONGEST_PATH = 4096


class CallerTokens:
    """Checks the tokens of callers."""

    def __init__(self, verifier: Verifier, redaction: CallRedaction, environment: str) -> None:
        self._verifier = verifier
        self._redaction = redaction
        self._environment = environment
        # Pairs of token and tool that were checked before, and whether the token is bound to resources as well.
        self.covered: dict[tuple[str, str], bool] = {}

    def check(self, checked: Checked, capability: Capability) -> None:
        """Check that the token is valid now, and that every link of its chain covers tool, version and resources.

        The resources of a write, or of a call under a token that is bound to some, are recorded. A call without
        recorded resources is visible only to tokens that are not bound to resources.
        """
        tool = checked.tool
        self._verifier.check(capability)
        # The resources of a calling tool are no property of the token.
        bound = None if capability.within is not None else self.covered.get((capability.digest, tool.digest))
        if bound is None:
            bound = self._cover(tool, capability)
        if not bound and not tool.writes:
            return
        more, contract, found = checked.more, tool.contract, None
        more.foreseen = ()
        if bound:
            found = resources_of(contract, checked.input)
        elif len(checked.model_input) <= _LARGEST_NAMED:
            try:
                changes = changes_of(contract, checked.input)
                more.foreseen = changes or ()
                found = resources_of(contract, checked.input) if changes is None else names_of(changes)
            except Failure:
                found = None  # this token is not bound to resources, so nothing is refused
        more.resources = None
        if found and len(found) <= _MOST_NAMED:
            more.resources = self._redaction.recordable_resources(checked, found)
        if bound:
            try:
                token_checks.check_resources(capability, contract, found or ())
            except token_checks.BlockedPath as failure:
                self._block(checked, failure, "token")
                raise

    def check_tool(self, tool: Prepared, capability: Capability) -> None:
        """Check that the token is valid now and covers the tool, whatever the input is."""
        self._verifier.check(capability)
        self._cover(tool, capability)

    def _cover(self, tool: Prepared, capability: Capability) -> bool:
        """Check that the token covers the tool. Return whether it is bound to resources as well."""
        token_checks.check_tool(capability, tool.contract, self._environment)
        if capability.within is None:
            if len(self.covered) > _MOST_COVERED:
                self.covered.clear()
            self.covered[capability.digest, tool.digest] = capability.bound
        return capability.bound

    def check_paths(self, checked: Checked) -> None:
        """Check that the permissions of the tool allow the paths in the input."""
        try:
            token_checks.check_paths(checked.tool, checked.input)
        except token_checks.BlockedPath as failure:
            self._block(checked, failure, "permissions")
            raise

    def can_name(self, call: Call, path: str) -> bool:
        """Whether a path may be recorded: it is no longer than a path can be, and contains no private value."""
        return len(path) <= _LONGEST_PATH and self._redaction.recordable_resources(call, (path,)) is not None

    def _block(self, checked: Checked, failure: token_checks.BlockedPath, source: str) -> None:
        """Record which path was refused, and by what."""
        call, contract = checked, checked.tool.contract
        path = as_written(contract, checked.input, failure.path)
        call.decision = Decision(
            behavior="deny",
            reason=failure.message,
            rules=(),
            policy="",
            source=source,
            blocked_path=path if self.can_name(call, path) else None,
        )
