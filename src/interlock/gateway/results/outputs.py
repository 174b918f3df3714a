"""Outputs of tools as others may see them: bounded in size, redacted, without the private values of the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from interlock.call.artifacts import Artifact, refer
from interlock.call.phases import Call, Granted, Ran, Verified
from interlock.call.prepared import Prepared
from interlock.contract.effects import Change
from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.bounds import result_too_large
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.gateway.persistence.change_values import PrivateValues
from interlock.gateway.results.map_output import check_part, check_size
from interlock.privacy.redact import Redactor, SchemaRedactor
from interlock.privacy.scrub import holds

if TYPE_CHECKING:
    from interlock.gateway.observe import Observer
    from interlock.gateway.redaction import CallRedaction
    from interlock.settings import Settings


class Outputs:
    """Redacts results, parts of results, files and reported changes."""

    def __init__(
        self,
        redactor: Redactor,
        settings: Settings,
        observer: Observer,
        redaction: CallRedaction,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._redactor = redactor
        self._settings = settings
        self._observer = observer
        self._redaction = redaction
        self._random_bytes = random_bytes
        self._redactors: dict[str, SchemaRedactor] = {}

    def most_bytes(self, tool: Prepared) -> int:
        """Return how many bytes a tool's result may have as JSON. The tool can lower the limit of the settings."""
        most = self._settings.max_result_bytes
        return most if tool.max_result is None else min(tool.max_result, most)

    def redact(self, ran: Ran, value: Any, most: int | None = None) -> Verified:
        """Set the value of a call to `value` without what its reader may not see. E3416 above `most` bytes."""
        tool = ran.tool
        redactor = tool.redactor or self.redactor_of(tool)
        if redactor.trivial:
            encoded, paths = encode(value), ()
        else:
            caller = ran.request.caller
            shown = redactor.apply(value, disclose=frozenset() if caller is None else caller.scopes)
            value, encoded, paths = shown.value, encode(shown.value), shown.paths
        if most is not None and len(encoded) > most:
            raise result_too_large(tool.ref, most, writes=tool.writes)
        ran.value, ran.encoded = value, encoded
        if paths or ran.more.redacted:
            ran.extend().redacted = paths
        return cast("Verified", ran)

    async def refer(self, call: Call) -> tuple[Artifact, ...]:
        """Return references to the files of a call. E3304 if one of them holds a private value of the call."""
        redaction, files = self._redaction, call.more.files
        hidden = redaction.private_values(call) if call.more.private else []

        def look() -> tuple[Artifact, ...] | None:
            shown = (content for file in files for content in (file.path.encode(), file.content))
            return None if holds(shown, hidden) else refer(call.id, files, self._redactor.text)

        # Searching large files takes time, and other calls should not wait for it.
        found = await WALKS.run(look)
        # INVARIANT: a credential that was lent or sent is never stored. The values of a closed lease are gone, so
        # nobody can search for them any more.
        if found is None or (call.more.lease is not None and call.more.lease.closed):
            raise Failure("E3304", f"{call.ref} left a file with something in it that the call was given in private")
        return found

    def shown_part(self, granted: Granted, value: Any, *, whole: bool = False) -> Any:
        """Return a part of a result as its reader may see it. E3303 if it breaks the contract; see `check_part`."""
        tool = granted.tool
        if tool.private:
            return None  # listeners learn that there is a part, and nothing of its content
        check_size(tool, value, self.most_bytes(tool))
        # INVARIANT: nothing that fits no schema is sent as a result or as a part of one.
        try:
            check_part(tool, value, whole=whole)
        except Failure as failure:
            self._observer.alert((failure.details or {})["violation"], granted)
            raise self._redaction.redact_failure(granted, failure) from None
        caller = granted.request.caller
        part = self.redactor_of(tool).apply(value, disclose=frozenset() if caller is None else caller.scopes)
        return self.clean(granted, part.value)

    def writable(self, call: Call, changes: tuple[Change, ...]) -> tuple[Change, ...]:
        """Return changes as they may be recorded: without the private values of the call."""
        if not changes or not call.more.private:
            return changes
        clean = self._redaction.without_private_values
        return tuple(
            replace(
                change,
                resource=clean(call, change.resource),
                before=clean(call, change.before),
                after=clean(call, change.after),
            )
            for change in changes
        )

    def resources(self, call: Call, changes: tuple[Change, ...]) -> list[str]:
        """Return the resources of changes as they may be recorded."""
        return [change.resource for change in self.writable(call, changes)]

    def clean(self, call: Call, value: Any) -> Any:
        """Return data without credentials, personal data and the private values of the call."""
        return self._redaction.without_private_values(call, self._redactor.value(value).value)

    def cleaned_facts(self, call: Call, facts: Json) -> Json:
        """Return facts about the data of a result, without what its reader may not see."""
        return {name: self.clean(call, one) if isinstance(one, str) else one for name, one in facts.items()}

    def private_values(self, call: Call, tool: Prepared) -> PrivateValues:
        """Return what decides which values of a call's changes are private."""
        # A schema without private places says nothing about a value that is not found without it.
        both = (tool.redactor or self.redactor_of(tool), tool.input_redactor or self._redaction.input_redactor(call))
        schemas = [schema for schema in both if schema.guarded]
        return PrivateValues(call.id, self._redactor, schemas, self._random_bytes)

    def redactor_of(self, tool: Prepared) -> SchemaRedactor:
        """Return the redactor of a tool's results; compiled once for each version."""
        found = self._redactors.get(tool.digest)
        if found is None:
            exempt = self._settings.no_pattern_redaction
            patterns = tool.contract.manifest.redact_results and tool.contract.id.namespace not in exempt
            found = self._redactor.for_schema(tool.contract.output.document, patterns=patterns)
            self._redactors[tool.digest] = found
        tool.redactor = found
        return found
