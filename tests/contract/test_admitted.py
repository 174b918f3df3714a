"""Contracts of admitted tools are read without models, and are what the models would make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from interlock import demo_tools
from interlock.contract import admitted
from interlock.contract.contract import Contract, admitted_contract, parse_contract
from interlock.contract.manifest import Effect, Execution, IdempotencyPart, Manifest, ObservabilityPart, parse_manifest
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from tests.support.manifests import COMPLETE

# Properties of a manifest, beside its fields.
DERIVED = ("address", "full_description", "tier", "runs_as", "executor", "reports_progress", "model_fields_set")
PARTS = ("id", "version", "auth", "timeout", "idempotency", "observability", "address", "ref", "runs_here", "delivers")
STATED: list[Json] = [
    {name: value for name, value in COMPLETE.items() if value is not None},
    # Admission stores the class that follows from another.
    parse_manifest({**COMPLETE, "mutation_class": None, "compensation_class": "irreversible"}).document(),
    *(tool.manifest.document() for tool in (demo_tools.balance, demo_tools.post, demo_tools.mail_statement)),
    {
        **COMPLETE,
        "timeout_class": "interactive",
        "external_io": False,
        "tags": ["a"],
        "aliases": ["older_name"],
        "required_scopes": ["accounts:read"],
        "sandbox": {"reads": {"data": "/srv"}},
        "idempotency": {"window_seconds": 7200},
        "observability": {"metrics": False},
        "network_policy": {"deny_all_egress": True},
        "estimated_cost": 2,
        "retry_policy": {"max_attempts": 2},
    },
]


def admitted_as(document: Json) -> Contract:
    return admitted_contract(orjson.dumps(document).decode(), digest(document))


def assert_defaults(stated: Mapping[str, Any], model: type[BaseModel]) -> None:
    for name, default in stated.items():
        of_model = model.model_fields[name].default
        assert default == (... if of_model is PydanticUndefined else of_model), name


def test_the_defaults_are_those_of_the_models() -> None:
    for stated in (admitted.PLAIN, admitted.LISTS, admitted.SELDOM):
        assert_defaults(stated, Manifest)
    for name, model in zip(admitted.PARTS, (IdempotencyPart, ObservabilityPart, Execution), strict=True):
        assert_defaults(admitted.PARTS[name], model)
    assert_defaults(admitted.EFFECT, Effect)
    for name, stated in admitted.SELDOM_PARTS.items():
        part: BaseModel = Manifest.model_fields[name].default
        assert_defaults(stated, type(part))


@pytest.mark.parametrize("document", STATED)
def test_an_admitted_contract_is_the_one_that_the_models_make(document: Json) -> None:
    read, made = admitted_as(document), parse_contract(document)
    assert type(read.manifest) is not type(made.manifest)
    for part in PARTS:
        assert getattr(read, part) == getattr(made, part), part
    for part in ("input", "output", "error"):
        assert getattr(read, part).document == getattr(made, part).document
    for name in (*Manifest.model_fields, *DERIVED):
        assert_same(getattr(read.manifest, name), getattr(made.manifest, name), name)
    assert (read.document(), read.digest) == (made.document(), made.digest)
    assert read.manifest.model_copy(update={"version": "9.0.0"}).version == "9.0.0"


def assert_same(value: Any, of_model: Any, name: str) -> None:
    if isinstance(of_model, BaseModel):
        for field in type(of_model).model_fields:
            assert_same(getattr(value, field), getattr(of_model, field), f"{name}.{field}")
    elif isinstance(of_model, tuple):
        for one, other in zip(value, cast("tuple[Any, ...]", of_model), strict=True):
            assert_same(one, other, name)
    else:
        assert (type(value), value) == (type(of_model), of_model), name


def test_a_manifest_is_not_changed() -> None:
    manifest = admitted_as(STATED[0]).manifest
    with pytest.raises(AttributeError):
        manifest.paged = True  # pyright: ignore[reportAttributeAccessIssue] - frozen
    with pytest.raises(AttributeError):
        getattr(manifest, "nothing_such")  # noqa: B009 - the type checker knows that there is none


def test_a_document_with_another_digest_is_checked_by_the_models() -> None:
    forged = {**STATED[0], "timeout_default": 100_000}
    with pytest.raises(Failure) as caught:
        admitted_contract(orjson.dumps(forged).decode(), digest(STATED[0]))
    assert caught.value.code == "E3105"
    assert "/timeout_default" in caught.value.message
    whole = admitted_contract(orjson.dumps(STATED[0]).decode(), "00" * 32)
    assert type(whole.manifest) is Manifest
