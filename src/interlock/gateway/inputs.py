"""The four inputs of a call, and every difference between them.

    model_input ─► observable_input ─► permission_input ─► call_input
        cursor, coercion, default      hooks          reviewer

`model_input` was sent by the caller, `observable_input` is visible to hooks and transcripts, policy decides about
`permission_input`, and the tool receives `call_input`. A call keeps the differences, in order and with their source;
applied to `model_input` in turn, they give each of the others exactly.

A call has all four while it runs, and its closing record has the source and the place of each difference, never a
value. Stored, and encrypted, are `model_input` and the differences with their values: by default
(`keep_inputs = "changed"`) if anything but a default was filled in, because defaults are part of the pinned contract;
with "always" for every call that is closed. The inputs of a call that waits for an approval are stored with its ticket,
and replaced when the call runs. If they should have been stored and were not, a record says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from interlock.call.phases import ABSENT, INPUTS, Call, Mutated, between
from interlock.core.record import step
from interlock.data.canonical import decode, private_copy

if TYPE_CHECKING:
    from interlock.data.schema import Json

# With keep_inputs = "changed", larger inputs are not stored; their hash is recorded.
LARGEST_STORED = 1 << 18
TOO_LARGE = f'withheld: inputs above {LARGEST_STORED:,} bytes are kept with keep_inputs = "always" alone'


@step
class Inputs:
    """The four inputs of a call. One that is None was not stored, or not reached; `withheld` says why."""

    model_input: Any
    observable_input: Any
    permission_input: Any
    call_input: Any
    changes: tuple[Json, ...]
    withheld: str = ""


def difference(source: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Mutated]:
    """Return how two inputs differ, member by member."""
    from interlock.data.schema import pointer

    return [
        Mutated(source, pointer([name]), before.get(name, ABSENT), after.get(name, ABSENT))
        for name in sorted(before.keys() | after.keys())
        if (name in before, before.get(name)) != (name in after, after.get(name))
    ]


def worth_keeping(call: Call) -> bool:
    """Whether the input of a call was changed in a way that the contract alone does not tell."""
    return any(change.source != "default" for change in call.more.mutations)


def to_keep(call: Call) -> Json:
    """Return what is stored of the inputs of a call. One that does not fit its contract has only a `model_input`."""
    stored: Json = {
        "model_input": decode(call.model_input),
        "changes": [_document(change) for change in call.more.mutations],
    }
    return stored if call.input is not None else {**stored, "reached": "model_input"}


def observable(call: Call) -> Json:
    """Return the input as hooks see it: converted and with defaults. Empty if it does not fit the contract."""
    if call.input is None:
        return {}
    changes = (change for change in call.more.mutations if between(change.source)[1] == "observable_input")
    return cast("Json", replay(decode(call.model_input), [_document(change) for change in changes]))


def _document(change: Mutated) -> Json:
    before, after = between(change.source)
    facts: Json = {"before": before, "after": after, "source": change.source, "pointer": change.pointer}
    return facts if change.after is ABSENT else {**facts, "value": change.after}


def read(stored: Json) -> Inputs:
    """Return the four inputs from what was stored of them."""
    changes: list[Json] = stored["changes"]
    found: list[Any] = [stored["model_input"]]
    if "reached" in stored:
        return Inputs(found[0], None, None, None, tuple(changes))
    for stage in INPUTS[1:]:
        found.append(replay(found[0], [one for one in changes if INPUTS.index(one["after"]) <= INPUTS.index(stage)]))
    model, observable, permission, call = found
    return Inputs(model, observable, permission, call, tuple(changes))


def replay(document: Mapping[str, Any], changes: Sequence[Json]) -> Any:
    """Return a copy of an input with changes applied to it, in order. A change without a value removes its place."""
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


def from_record(closed: Json, default_of: Callable[[str], tuple[str, Any] | None]) -> tuple[Json, ...]:
    """Return the changes in a closing record. `default_of` says which default the contract has for a place."""
    mutations = cast("list[Json]", closed.get("inputMutations") or [])
    changes: list[Json] = []
    for one in mutations:
        before, after = between(one["source"])
        change: Json = {"before": before, "after": after, "source": one["source"], "pointer": one["pointer"]}
        default = default_of(one["pointer"]) if one["source"] == "default" else None
        if default is not None:
            change["value"] = default[1]
        changes.append(change)
    return tuple(changes)
