"""Previews: the changes that a call would make, from the tool's own preview or from its side-effect manifest."""

from __future__ import annotations

from typing import cast

from interlock.call.context import previewed
from interlock.call.phases import Granted, Ran
from interlock.contract.effects import Change, predict
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.gateway.execution.run_tool import ToolRunner
from interlock.gateway.failure_log import FailureLog


class Previews:
    """Makes previews of granted calls."""

    def __init__(self, runner: ToolRunner, failure_log: FailureLog) -> None:
        self._runner = runner
        self._failure_log = failure_log

    async def run(self, granted: Granted) -> Ran:
        """Run only the preview of a call, as its result."""
        if granted.tool.handler("preview") is not None:
            granted.move("running")
        granted.output = await self.look(granted)
        granted.extend().source = "preview"
        return cast("Ran", granted)

    async def look(self, granted: Granted) -> Json:
        """Return what the call would do."""
        call, contract = granted, granted.tool.contract
        effects = predict(contract.mutation.effects, granted.input)
        preconditions: dict[str, bool] = {}
        impact = "from the tool's side-effect manifest; nothing was run"
        if granted.tool.handler("preview") is not None and call.request.operation == "invoke":
            try:
                answer = await self._runner.run(granted, None)
            finally:
                if call.state == "awaiting_approval":
                    call.launched = call.returned = False  # only the preview ran: the call itself has not begun
            try:
                preview = previewed(answer)
            except Failure as failure:
                raise self._failure_log.redact_and_log(call, failure) from failure
            effects, preconditions, impact = preview.effects or effects, dict(preview.preconditions), preview.impact
        cost = contract.manifest.estimated_cost
        return {
            "predicted_effects": [_document(change) for change in effects],
            "preconditions": preconditions,
            "impact": impact,
            **({} if cost is None else {"estimated_cost": cost}),
        }


def _document(change: Change) -> Json:
    facts: Json = {"resource": change.resource, "operation": change.operation}
    if change.before is not None:
        facts["before"] = change.before
    if change.after is not None:
        facts["after"] = change.after
    return facts
