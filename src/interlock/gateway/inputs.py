"""The four inputs of a call, and every difference between them.

    model_input ─► observable_input ─► permission_input ─► call_input
        cursor, coercion, default      hooks          reviewer

`model_input` is what the caller sent, `observable_input` what hooks and transcripts see, `permission_input` what policy
judged, and `call_input` what the tool got. A call keeps the differences, in order and with their source; replayed on
`model_input` they give each of the others exactly.

A call holds the four of them while it runs, and its closing record has the source and the place of each difference,
never a value. What is kept at rest, sealed, is `model_input` and the differences with their values: by default
(`keep_inputs = "changed"`) where something other than a default was filled in, because a default stands in the pinned
version of the contract; with "always" of every call that is closed. Those of a call that waits for a person are stored
with its ticket, however that ends, and replaced when the call runs. A record says why they were not kept where they
should have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from interlock.call.phases import ABSENT, INPUTS, Call, Mutated, between
from interlock.core.record import step
from interlock.data.canonical import decode, private_copy
from interlock.data.schema import Json, pointer

# With keep_inputs = "changed", larger inputs are not kept; their hash is on record.
LARGEST_KEPT = 1 << 18
TOO_LARGE = f'withheld: inputs above {LARGEST_KEPT:,} bytes are kept with keep_inputs = "always" alone'


@step
class Inputs:
    """The four inputs of a call. One that is None was not kept, or not reached; `withheld` says why."""

    model_input: Any
    observable_input: Any
    permission_input: Any
    call_input: Any
    changes: tuple[Json, ...]
    withheld: str = ""


def difference(source: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Mutated]:
    """How two inputs differ, member by member."""
    return [
        Mutated(source, pointer([name]), before.get(name, ABSENT), after.get(name, ABSENT))
        for name in sorted(before.keys() | after.keys())
        if (name in before, before.get(name)) != (name in after, after.get(name))
    ]


def worth_keeping(call: Call) -> bool:
    """Whether the contract alone does not tell how the input of a call was changed."""
    return any(change.source != "default" for change in call.more.mutations)


def to_keep(call: Call) -> Json:
    """What is kept of the inputs of a call. One that does not fit its contract got no further than `model_input`."""
    kept: Json = {
        "model_input": decode(call.model_input),
        "changes": [_document(change) for change in call.more.mutations],
    }
    return kept if call.input is not None else {**kept, "reached": "model_input"}


def observable(call: Call) -> Json:
    """The input as hooks see it: as it was sent, with what was filled in and converted. Empty where it does not fit."""
    if call.input is None:
        return {}
    changes = (change for change in call.more.mutations if between(change.source)[1] == "observable_input")
    return cast("Json", replay(decode(call.model_input), [_document(change) for change in changes]))


def _document(change: Mutated) -> Json:
    before, after = between(change.source)
    facts: Json = {"before": before, "after": after, "source": change.source, "pointer": change.pointer}
    return facts if change.after is ABSENT else {**facts, "value": change.after}


def read(kept: Json) -> Inputs:
    """The four inputs from what was kept of them."""
    changes: list[Json] = kept["changes"]
    found: list[Any] = [kept["model_input"]]
    if "reached" in kept:
        return Inputs(found[0], None, None, None, tuple(changes))
    for stage in INPUTS[1:]:
        found.append(replay(found[0], [one for one in changes if INPUTS.index(one["after"]) <= INPUTS.index(stage)]))
    model, observable, permission, call = found
    return Inputs(model, observable, permission, call, tuple(changes))


def replay(document: Mapping[str, Any], changes: Sequence[Json]) -> Any:
    """A copy of an input with changes made to it, in order. One without a value takes its place away."""
    root: Json = {"": private_copy(dict(document))}
    for change in changes:
        steps = ["", *(_unescaped(step) for step in change["pointer"].split("/")[1:])]
        place: Any = root
        for one in steps[:-1]:
            place = place[int(one) if isinstance(place, list) else one]
        last: Any = int(steps[-1]) if isinstance(place, list) else steps[-1]
        if "value" in change:
            place[last] = private_copy(change["value"])
        else:
            del place[last]
    return root[""]


def _unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def from_record(closed: Json, defaults: Mapping[str, Any]) -> tuple[Json, ...]:
    """The changes that a closing record tells, with the values of defaults, which the contract has."""
    told = cast("list[Json]", closed.get("inputMutations") or [])
    changes: list[Json] = []
    for one in told:
        before, after = between(one["source"])
        change: Json = {"before": before, "after": after, "source": one["source"], "pointer": one["pointer"]}
        name = _unescaped(one["pointer"].removeprefix("/"))
        if one["source"] == "default" and name in defaults:
            change["value"] = defaults[name]
        changes.append(change)
    return tuple(changes)
