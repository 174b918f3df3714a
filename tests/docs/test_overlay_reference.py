"""The page of overlay fields has every field, and its examples are overlays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from docs import overlay_reference
from interlock.data.documents import read_yaml
from interlock.upstreams.overlay import Overlay, parse_overlay


@pytest.mark.parametrize(("field", "text"), overlay_reference.examples())
def test_an_example_of_the_page_is_an_overlay(field: str, text: str) -> None:
    overlay = parse_overlay(text)
    (document,) = read_yaml(text)
    # What was read says the same as the text, and not something that the parser filled in.
    assert overlay.model_dump(mode="json", exclude_unset=True) == document, field


def parts_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, and those that their fields lead to."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for info in annotation.model_fields.values():
            yield from parts_of(info.annotation)
    for argument in get_args(annotation):
        yield from parts_of(argument)


def test_every_part_of_an_overlay_is_on_the_page() -> None:
    # The page is not written where a field of one of these parts is left out.
    assert set(parts_of(Overlay)) == {model for _, model, *_ in overlay_reference.PARTS}
