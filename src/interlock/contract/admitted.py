"""The manifest of an admitted tool, read from its document without the models of one.

Admission has checked the document, and its digest says that it is the same. Loading the models takes a quarter of the
time of a command that reads a contract. Here is what policies, lists and calls ask of every manifest; whatever else is
asked, the models answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import orjson

from interlock.contract.executors import OWN_DESCRIPTION, kind_of
from interlock.contract.timeouts import DEFAULT_S

if TYPE_CHECKING:
    from interlock.contract.manifest import Manifest
    from interlock.data.schema import Json

# Fields with values that are the same in JSON and in Python, and their defaults. A test compares them with the models.
PLAIN: Mapping[str, Any] = {
    "tool_id": ..., "version": ..., "name": ..., "description": ..., "provider": ..., "protocol": ...,
    "parameters": ..., "result_schema": None, "error_schema": None, "external_service": None, "namespace": "default",
    "mutation_class": None, "title": None, "timeout_class": None, "timeout_default": DEFAULT_S, "timeout_max": None,
    "compensable": False, "previews": False, "versioned": False, "has_fixture": False, "concurrency_safe": False,
    "isolated_calls": False, "restart_safe": False, "external_io": True, "cancellable": True, "paged": False,
    "coerce_output": False, "tolerant_output": False, "behaviour_change": False, "redact_results": True,
    "max_inline_chars": 25_000, "max_result_bytes": None, "persist_output": True, "private_output": False,
}  # fmt: skip
# Fields that are lists in JSON and tuples in Python.
LISTS: Mapping[str, Any] = {
    "required_permissions": None, "required_scopes": (), "tags": (), "aliases": (), "expected_artifacts": (),
}  # fmt: skip
# Parts that most manifests state, each with its plain fields, and the parts of a list.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "idempotency": {"key": "caller", "window_seconds": None},
    "observability": {"trace": True, "metrics": True, "audit": True},
    "execution": {"kind": "function", "target": ..., "implementation": None},
}
EFFECT: Mapping[str, Any] = {"resource": ..., "operation": ..., "scope": "resource"}
# Fields that few manifests state. The models read them then.
SELDOM: Mapping[str, Any] = {"sandbox": None, "approval": None, "compensation_class": None, "preconditions": ()}
SELDOM_PARTS: Mapping[str, Mapping[str, Any]] = {
    "network_policy": {"allowed_domains": (), "deny_all_egress": False},
    "checkpoint_config": {"enabled": False},
}


class _Facts:
    """Values under their names, and a model that knows more."""

    def __init__(self, values: Mapping[str, Any], model: Callable[[], Any]) -> None:
        vars(self).update(values, _answering=model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._answering(), name)
        vars(self)[name] = value  # the next time, it is had at once
        return value

    def __eq__(self, other: object) -> bool:
        return self._answering() == (other._answering() if isinstance(other, _Facts) else other)

    def __hash__(self) -> int:
        return hash(self._answering())

    def __repr__(self) -> str:
        return repr(self._answering())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a manifest is not changed: {name}")


class Admitted(_Facts):
    """A manifest with the attributes of the model. To the type checker it is one."""

    def __init__(self, text: str, document: Json) -> None:
        values = {name: document.get(name, default) for name, default in PLAIN.items()}
        for name, default in LISTS.items():
            values[name] = tuple(document[name]) if document.get(name) is not None else default
        for name, fields in PARTS.items():
            native: Json = {"native": {}} if name == "execution" else {}
            values[name] = (
                None if document.get(name) is None else _part(document[name], {**fields, **native}, self._part, name)
            )
        own = None if values["execution"] is None else values["execution"].native.get(OWN_DESCRIPTION)
        # In JSON, whole numbers are written without a point.
        cost = document.get("estimated_cost")
        values["estimated_cost"] = None if cost is None else float(cost)
        values["full_description"] = values["description"] if own is None else str(own)
        stated: list[Json] = document.get("effects") or []
        values["effects"] = tuple(_part(one, EFFECT, self._effect, at) for at, one in enumerate(stated))
        values |= {name: default for name, default in SELDOM.items() if document.get(name) is None}
        unstated = {name: fields for name, fields in SELDOM_PARTS.items() if name not in document}
        values |= {name: _part({}, fields, self._part, name) for name, fields in unstated.items()}
        kind = kind_of("function" if values["execution"] is None else values["execution"].kind)
        values |= {"address": f"{values['namespace']}.{values['tool_id']}", "runs_as": kind}
        if "sandbox" in values:
            values["executor"] = kind.module
        super().__init__({**values, "model_fields_set": set(document), "_text": text}, lambda: self._model)

    @cached_property
    def _model(self) -> Manifest:
        from interlock.contract.manifest import parse_manifest

        return parse_manifest(self.document())

    def _part(self, name: str) -> Any:
        return getattr(self._model, name)

    def _effect(self, at: int) -> Any:
        return self._model.effects[at]

    def document(self) -> Json:
        """The manifest as JSON, without defaults."""
        return orjson.loads(self._text)


def _part(stated: Json, fields: Mapping[str, Any], model: Callable[[Any], Any], place: object) -> _Facts:
    return _Facts({name: stated.get(name, default) for name, default in fields.items()}, partial(model, place))
