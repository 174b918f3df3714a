"""The metadata of results: how long a call took, which rules decided it, and what its tool attached to the value."""

from __future__ import annotations

from functools import partial

from interlock.call.phases import Call
from interlock.contract.attached import Attached, binary, cleaned, handoffs
from interlock.contract.effects import Change
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.gateway.observe import Observer
from interlock.gateway.preview_diff import preview_differences
from interlock.gateway.redaction import CallRedaction
from interlock.gateway.results.outputs import Outputs
from interlock.privacy.scrub import holds


class ResultMetadata:
    """Collects the metadata of a result."""

    def __init__(self, clock: Clock, observer: Observer, redaction: CallRedaction, outputs: Outputs) -> None:
        self._clock = clock
        self._observer = observer
        self._redaction = redaction
        self._outputs = outputs

    def of(self, call: Call) -> Json:
        """Return the metadata that every result has, and what is known about this call."""
        metadata: Json = {"latency_ms": call.latency_ms(self._clock.monotonic())}
        if call.decision is not None:
            metadata["policy_refs"] = call.decision.rules
        more = call.more
        if more.approval_outcome is not None:
            metadata["approval"] = more.approval_outcome
        if call.tool is not None and call.tool.notice is not None:
            metadata["deprecation"] = call.tool.notice
        if more.mutations:
            metadata["input_mutations"] = [{"source": one.source, "pointer": one.pointer} for one in more.mutations]
        if more.pagination is not None:
            metadata["pagination"] = more.pagination
        if more.warnings:
            metadata["warnings"] = more.warnings
        if more.hook_outputs:
            metadata["hook_outputs"] = more.hook_outputs
        if more.parts:
            metadata["parts"] = [part.value for part in more.parts]
            yielded = [index for index, part in enumerate(more.parts, 1) if part.yielded]
            metadata |= {"yielded_parts": yielded} if yielded else {}
        if more.context is not None and more.context.last_progress is not None:
            metadata["progress"] = self._redaction.redact_data(call, more.context.last_progress)
        if more.context is not None and more.context.modifiers:
            metadata["context_modifiers"] = self._redaction.without_private_values(call, more.context.modifiers)
        return metadata

    def attach(self, call: Call, attached: Attached, now_ms: int, metadata: Json) -> None:
        """Add what a tool attached to its value, without what its reader may not see."""
        redaction, caller = self._redaction, call.request.caller
        assert caller is not None
        hidden = redaction.private_values(call) if call.more.private else []
        # INVARIANT: a credential that was lent or sent does not leave in an image either.
        if holds([binary(item) for item in attached.content], hidden):
            raise Failure("E3304", f"{call.ref} attached something with what the call was given in private")
        clean = partial(self._outputs.clean, call)
        if attached.content and call.tool is not None:
            stated = call.tool.contract.manifest.content_types
            strange = sorted({str(one["type"]) for one in attached.content}.difference(stated)) if stated else ()
            if strange:
                call.extend().warnings.extend(f"UNDECLARED_CONTENT type={one}" for one in strange)
                metadata["warnings"] = call.more.warnings
            if not call.tool.private:
                metadata["content"] = cleaned(attached.content, clean)
        if attached.views:
            metadata["views"] = clean(attached.views)
        if attached.handoffs:
            metadata["handoffs"] = clean(handoffs(attached, call.id, caller, now_ms))
        if attached.provenance:
            metadata |= self._outputs.cleaned_facts(call, attached.provenance)

    def compare_with_preview(self, call: Call, changes: tuple[Change, ...], metadata: Json) -> None:
        """Compare what the call did with the preview that its reviewer was shown, and alert if they differ."""
        assert call.more.previewed is not None
        differences = preview_differences(call.more.previewed, changes)
        if differences:
            metadata["previewDifferences"] = [
                self._redaction.redact_text(call, difference) for difference in differences
            ]
            self._observer.alert("PREVIEW_MISMATCH", call, differences=metadata["previewDifferences"])

    def warn_unreported(self, call: Call, metadata: Json) -> None:
        """Warn that a tool which can report its changes reported none although it is a write."""
        call.extend().warnings.append("WRITE_TOOL_NO_MUTATION")
        metadata["warnings"] = call.more.warnings
        self._observer.alert("WRITE_TOOL_NO_MUTATION", call)
